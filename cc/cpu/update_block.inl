// The CPU kernel of the update. Included by one .cc for each instruction set, which defines
// JFA_ISA.
//
// A block is worked on in tiles. What is not float32, and gradients that need a scale, pass through
// a float32 buffer of one tile, so the update loop sees float32 only and is instantiated for its
// options, not for every set of dtypes. float32 buffers are used where they lie. With float64
// parameters all that is said of float32 is true of float64.
#include "cpu/noise_tile.inl"
#include "cpu/tiles.inl"

namespace jfa::cpu::JFA_ISA {
namespace {

// So short that all streams from memory keep flowing while the gradients of a tile pass through
// their buffer. Clipped, GPT-2's 124 M float32 parameters take 73 ms of processor time with 128 to
// 512 elements, as unclipped and as three plain scalings in place do, but 92 ms with 1024; in
// bfloat16 70 ms with 256, 74 with 128 or 512, 95 with 1024. Prefetching ahead of short tiles made
// them 12 to 50 % slower (2-core x86 container, AVX-512, 2026-11-29).
constexpr std::int64_t kTileElements = 256;

// Moments that are not given are zero.
template <typename Real>
alignas(64) constexpr Real kZeros[kTileElements] = {};

template <typename Real>
struct Tile {
  const Real* param;
  const Real* grad;
  const Real* mu;
  const Real* nu;
  const Real* nu_max;
  Real* out;
  Real* mu_out;
  Real* nu_out;
  Real* nu_max_out;
  std::int64_t n;
  Real weight_decay;
};

template <typename Real, Amsgrad kAmsgrad, bool kNesterov, bool kWriteParams>
void UpdateTile(const AdamWScalars<Real>& scalars, const Tile<Real>& tile) {
  const AdamW<Real, kAmsgrad, kNesterov> adamw{scalars};
  const Tile<Real> t = tile;  // a local copy: stores through Real* cannot change it
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < t.n; ++i) {
    Moments<Real> moments{t.mu[i], t.nu[i], 0};
    if (kAmsgrad != Amsgrad::kOff) moments.nu_max = t.nu_max[i];
    const Real param = t.param[i];
    const ElementUpdate<Real> next = adamw(param, t.grad[i], moments, t.weight_decay);
    t.out[i] = kWriteParams ? param + next.update : next.update;
    t.mu_out[i] = next.moments.mu;
    t.nu_out[i] = next.moments.nu;
    if (kAmsgrad != Amsgrad::kOff) t.nu_max_out[i] = next.moments.nu_max;
  }
}

template <typename Real>
using UpdateTileFn = void (*)(const AdamWScalars<Real>&, const Tile<Real>&);

template <typename Real, Amsgrad kAmsgrad>
UpdateTileFn<Real> SelectUpdateTile(bool nesterov, bool write_params) {
  if (nesterov) {
    return write_params ? UpdateTile<Real, kAmsgrad, true, true>
                        : UpdateTile<Real, kAmsgrad, true, false>;
  }
  return write_params ? UpdateTile<Real, kAmsgrad, false, true>
                      : UpdateTile<Real, kAmsgrad, false, false>;
}

template <typename Real>
UpdateTileFn<Real> SelectUpdateTile(const UpdateStep& step) {
  switch (step.amsgrad) {
    case Amsgrad::kUncorrected:
      return SelectUpdateTile<Real, Amsgrad::kUncorrected>(step.nesterov, step.write_params);
    case Amsgrad::kCorrected:
      return SelectUpdateTile<Real, Amsgrad::kCorrected>(step.nesterov, step.write_params);
    default:
      return SelectUpdateTile<Real, Amsgrad::kOff>(step.nesterov, step.write_params);
  }
}

void CopyUnlessSame(const void* from, void* to, std::int64_t bytes) {
  if (from != to) __builtin_memcpy(to, from, static_cast<unsigned long>(bytes));
}

void KeepMoment(DType dtype, const void* from, void* to, std::int64_t n) {
  const std::int64_t bytes = n * SizeOf(dtype);
  if (from == nullptr) {
    __builtin_memset(to, 0, static_cast<unsigned long>(bytes));
  } else {
    CopyUnlessSame(from, to, bytes);
  }
}

void FillMinusZero(DType dtype, void* out, std::int64_t n) {
  if (dtype == DType::kFloat64) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<double*>(out)[i] = -0.0;
  } else if (dtype == DType::kFloat32) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<float*>(out)[i] = -0.0f;
  } else {
    // bfloat16 and float16 share the pattern.
    for (std::int64_t i = 0; i < n; ++i) static_cast<Word16*>(out)[i] = 0x8000u;
  }
}

// A skipped step: state and parameters keep their bits, the update is -0.0, which leaves every
// parameter, +0.0 and -0.0 alike, as it is under addition.
void SkipBlock(const UpdateStep& step, const UpdateBlock& block) {
  const std::int64_t n = block.num_elements;
  if (step.write_params) {
    CopyUnlessSame(block.param, block.out, n * SizeOf(block.param_dtype));
  } else {
    FillMinusZero(block.param_dtype, block.out, n);
  }
  KeepMoment(step.mu_dtype, block.mu, block.mu_out, n);
  KeepMoment(step.nu_dtype, block.nu, block.nu_out, n);
  if (step.amsgrad != Amsgrad::kOff) {
    KeepMoment(step.nu_dtype, block.nu_max, block.nu_max_out, n);
  }
  if (block.copy_out != nullptr) {
    CopyUnlessSame(block.copy, block.copy_out, n * SizeOf(block.copy_dtype));
  }
  if (step.has_ema) {
    CopyUnlessSame(block.ema, block.ema_out, n * SizeOf(ArithmeticOf(block.param_dtype)));
  }
}

// What of a tile is not float32 in memory, as float32.
template <typename Real>
struct TileBuffers {
  alignas(64) Real param[kTileElements];
  alignas(64) Real grad[kTileElements];
  alignas(64) Real mu[kTileElements];
  alignas(64) Real nu[kTileElements];
  alignas(64) Real nu_max[kTileElements];
  alignas(64) Real out[kTileElements];
  alignas(64) Word32 noise[kTileElements];
};

template <typename Real>
const Real* MomentTile(const void* moment, DType dtype, std::int64_t begin, std::int64_t n,
                       Real* buffer) {
  return moment == nullptr ? kZeros<Real> : TileOf(moment, dtype, begin, n, buffer);
}

// Where the new values go: to the target itself, or to `buffer` on their way.
template <typename Real>
Real* TileFor(void* target, DType dtype, std::int64_t begin, Real* buffer) {
  return dtype == RealTraits<Real>::kDType ? static_cast<Real*>(target) + begin : buffer;
}

template <typename Real>
Tile<Real> LoadTiles(const UpdateStep& step, const UpdateBlock& block, std::int64_t begin,
                     std::int64_t n, TileBuffers<Real>* buffers) {
  const StepNumbers<Real>& numbers = step.Numbers<Real>();
  const Real* grad = TileOf(block.grad, block.grad_dtype, begin, n, buffers->grad);
  grad = UnscaleTile(numbers.unscale, grad, n, buffers->grad);
  Tile<Real> tile;
  tile.param = TileOf(block.param, block.param_dtype, begin, n, buffers->param);
  tile.grad = ClipTile(numbers.clip, grad, n, buffers->grad);
  tile.mu = MomentTile(block.mu, step.mu_dtype, begin, n, buffers->mu);
  tile.nu = MomentTile(block.nu, step.nu_dtype, begin, n, buffers->nu);
  tile.nu_max = nullptr;
  tile.nu_max_out = nullptr;
  if (step.amsgrad != Amsgrad::kOff) {
    tile.nu_max = MomentTile(block.nu_max, step.nu_dtype, begin, n, buffers->nu_max);
    tile.nu_max_out = TileFor(block.nu_max_out, step.nu_dtype, begin, buffers->nu_max);
  }
  tile.out = TileFor(block.out, block.param_dtype, begin, buffers->out);
  tile.mu_out = TileFor(block.mu_out, step.mu_dtype, begin, buffers->mu);
  tile.nu_out = TileFor(block.nu_out, step.nu_dtype, begin, buffers->nu);
  tile.n = n;
  tile.weight_decay = block.decays ? numbers.scalars.weight_decay : 0;
  return tile;
}

void StoreMoments(const UpdateStep& step, const UpdateBlock& block, const Tile<float>& tile,
                  std::int64_t begin, TileBuffers<float>* buffers) {
  const std::int64_t n = tile.n;
  const bool mu_is_low = step.mu_dtype != DType::kFloat32;
  const bool nu_is_low = step.nu_dtype != DType::kFloat32;
  if (step.stochastic_moments && (mu_is_low || nu_is_low)) {
    FillNoise<kTileElements>(block.noise, block, begin, n, buffers->noise);
    if (mu_is_low) {
      StoreTileStochasticAs(step.mu_dtype, tile.mu_out, buffers->noise, kMuNoiseShift, block.mu_out,
                            begin, n);
    }
    if (nu_is_low) {
      StoreTileStochasticAs(step.nu_dtype, tile.nu_out, buffers->noise, kNuNoiseShift, block.nu_out,
                            begin, n);
    }
  } else {
    StoreTileAs(step.mu_dtype, tile.mu_out, block.mu_out, begin, n);
    StoreTileAs(step.nu_dtype, tile.nu_out, block.nu_out, begin, n);
  }
  if (step.amsgrad != Amsgrad::kOff) {
    StoreTileAs(step.nu_dtype, tile.nu_max_out, block.nu_max_out, begin, n);
  }
}

void StoreOut(const UpdateStep& step, const UpdateBlock& block, const Tile<float>& tile,
              std::int64_t begin, TileBuffers<float>* buffers) {
  if (step.stochastic_params && step.write_params && block.param_dtype == DType::kBfloat16) {
    FillNoise<kTileElements>(block.noise.OfParams(), block, begin, tile.n, buffers->noise);
    StoreTileStochastic<Bfloat16>(tile.out, buffers->noise, kParamNoiseShift, block.out, begin,
                                  tile.n);
  } else {
    StoreTileAs(block.param_dtype, tile.out, block.out, begin, tile.n);
  }
}

// What is rounded on its way to memory.
void StoreRounded(const UpdateStep& step, const UpdateBlock& block, const Tile<float>& tile,
                  std::int64_t begin, TileBuffers<float>* buffers) {
  StoreMoments(step, block, tile, begin, buffers);
  StoreOut(step, block, tile, begin, buffers);
  if (block.copy_out != nullptr) {
    StoreTileAs(block.copy_dtype, tile.out, block.copy_out, begin, tile.n);
  }
}
// float64 is computed where it is stored.
void StoreRounded(const UpdateStep&, const UpdateBlock&, const Tile<double>&, std::int64_t,
                  TileBuffers<double>*) {}

// Of the new parameters as they are stored, or will be when the stored updates are added to them.
template <typename Real>
void UpdateEma(const UpdateStep& step, const UpdateBlock& block, const Tile<Real>& tile,
               std::int64_t begin, TileBuffers<Real>* buffers) {
  const std::int64_t n = tile.n;
  const Real* param = TileOf(block.out, block.param_dtype, begin, n, buffers->out);
  if (!step.write_params) {
    AddTiles(tile.param, param, n, buffers->out);
    RoundTile(block.param_dtype, n, buffers->out);
    param = buffers->out;
  }
  const Ema<Real> next_ema = step.Numbers<Real>().ema;
  const Real* const ema = static_cast<const Real*>(block.ema) + begin;
  Real* const ema_out = static_cast<Real*>(block.ema_out) + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) ema_out[i] = next_ema(ema[i], param[i]);
}

// Whether the update loop writes all results where they belong.
template <typename Real>
bool NeedsNoStores(const UpdateStep& step, const UpdateBlock& block) {
  constexpr DType kReal = RealTraits<Real>::kDType;
  return block.param_dtype == kReal && step.mu_dtype == kReal && step.nu_dtype == kReal &&
         block.copy_out == nullptr && !step.has_ema;
}

template <typename Real>
void StoreTiles(const UpdateStep& step, const UpdateBlock& block, const Tile<Real>& tile,
                std::int64_t begin, TileBuffers<Real>* buffers) {
  StoreRounded(step, block, tile, begin, buffers);
  if (step.has_ema) UpdateEma(step, block, tile, begin, buffers);
}

template <typename Real>
void UpdateTiles(const UpdateStep& step, const UpdateBlock& block) {
  TileBuffers<Real> buffers;
  const AdamWScalars<Real> scalars =
      WithLearningRate(step.Numbers<Real>().scalars, block.learning_rate);
  const UpdateTileFn<Real> update_tile = SelectUpdateTile<Real>(step);
  const bool direct = NeedsNoStores<Real>(step, block);
  for (std::int64_t begin = 0; begin < block.num_elements; begin += kTileElements) {
    const std::int64_t left = block.num_elements - begin;
    const std::int64_t n = left < kTileElements ? left : kTileElements;
    const Tile<Real> tile = LoadTiles(step, block, begin, n, &buffers);
    update_tile(scalars, tile);
    if (!direct) StoreTiles(step, block, tile, begin, &buffers);
  }
}

}  // namespace

void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block) {
  if (step.skip) return SkipBlock(step, block);
  if (step.is_float64) return UpdateTiles<double>(step, block);
  UpdateTiles<float>(step, block);
}

}  // namespace jfa::cpu::JFA_ISA
