// Rungs of `python -m jax_fused_adamw.bench --ladder`: the update as one writes it first, and with
// one thing changed. They teach, and the optimizer does not use them; the last rung is
// cuda/update_kernel.cu. One leaf a launch, float32, in place, plain AdamW, never skipped.
#include "core/adamw.h"
#include "core/chunks.h"
#include "core/scalars.h"
#include "cuda/io.cuh"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

struct Element {
  float param;
  float mu;
  float nu;
};

__device__ __forceinline__ Element UpdateElement(const HyperTerms<float>& terms, float gradient,
                                                 const Element& old) {
  const AdamW<float, Amsgrad::kOff, false> adamw{MakeScalars<false>(terms)};
  const GradientUnscale<float> unscale = MakeUnscale(terms);
  const float g = unscale.exact_reciprocal ? unscale.Multiply(gradient) : unscale.Divide(gradient);
  const ElementUpdate<float> next =
      adamw(old.param, g, {old.mu, old.nu, 0.0f}, adamw.s.weight_decay);
  return {old.param + next.update, next.moments.mu, next.moments.nu};
}

__device__ __forceinline__ void SetTermsOf(int hyper, const StepOperands& step,
                                           HyperTerms<float>* terms) {
  constexpr bool kMaximize = false;
  constexpr double kLrScale = 1.0;
  step.SetTerms<false>(hyper, step.ReadRaw(hyper, 0), step.count.Read(0), kMaximize, kLrScale,
                       terms);
}

}  // namespace

// One thread an element, and every thread works out the bias corrections: two powers in double.
extern "C" __global__ void __launch_bounds__(kThreads)
    LadderNaive(const __grid_constant__ StepOperands step, float* param, const float* grad,
                float* mu, float* nu, long long num_elements) {
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_elements) return;
  HyperTerms<float> terms;
#pragma unroll
  for (int hyper = 0; hyper < kNumHyper; ++hyper) SetTermsOf(hyper, step, &terms);
  const Element next = UpdateElement(terms, grad[i], {param[i], mu[i], nu[i]});
  param[i] = next.param;
  mu[i] = next.mu;
  nu[i] = next.nu;
}

// Four elements a thread, each array by one 16-byte access; the corrections once a block, by eight
// of its threads while the loads are under way.
extern "C" __global__ void __launch_bounds__(kThreads)
    LadderVectors(const __grid_constant__ StepOperands step, float* param, const float* grad,
                  float* mu, float* nu, long long num_elements) {
  const Block chunk = LocateBlock(blockIdx.x, num_elements, 1, kChunk);
  const int offset = static_cast<int>(threadIdx.x) * kVector;
  const int left = static_cast<int>(chunk.elements) - offset;
  const Span span{chunk.begin + offset, left, left >= kVector};
  RawVector<float> raw_param = LoadWords<float>(param, span);
  RawVector<float> raw_mu = LoadWords<float>(mu, span);
  RawVector<float> raw_nu = LoadWords<float>(nu, span);
  const RawVector<float> raw_grad = LoadWords<float>(grad, span);

  __shared__ __align__(16) HyperTerms<float> terms;
  if (threadIdx.x < kNumHyper) SetTermsOf(static_cast<int>(threadIdx.x), step, &terms);
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Element old{BitsToFloat(raw_param.word[i]), BitsToFloat(raw_mu.word[i]),
                      BitsToFloat(raw_nu.word[i])};
    const Element next = UpdateElement(terms, BitsToFloat(raw_grad.word[i]), old);
    raw_param.word[i] = FloatToBits(next.param);
    raw_mu.word[i] = FloatToBits(next.mu);
    raw_nu.word[i] = FloatToBits(next.nu);
  }
  StoreWords(param, span, raw_param);
  StoreWords(mu, span, raw_mu);
  StoreWords(nu, span, raw_nu);
}

}  // namespace jfa::cuda
