// The CPU kernel of the update. Included by one .cc for each instruction set, which defines
// JFA_ISA.
//
// A block is worked on in tiles. What is not float32, and gradients that need a scale, pass through
// a float32 buffer of one tile, so the update loop sees float32 only and is instantiated for its
// options, not for every set of dtypes. float32 buffers are used where they lie.
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
alignas(64) constexpr float kZeros[kTileElements] = {};

struct Tile {
  const float* param;
  const float* grad;
  const float* mu;
  const float* nu;
  const float* nu_max;
  float* out;
  float* mu_out;
  float* nu_out;
  float* nu_max_out;
  std::int64_t n;
  float weight_decay;
};

template <Amsgrad kAmsgrad, bool kNesterov, bool kWriteParams>
void UpdateTile(const AdamWScalars& scalars, const Tile& tile) {
  const AdamW<kAmsgrad, kNesterov> adamw{scalars};
  const Tile t = tile;  // a local copy: stores through float* cannot change it
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < t.n; ++i) {
    Moments moments{t.mu[i], t.nu[i], 0.0f};
    if (kAmsgrad != Amsgrad::kOff) moments.nu_max = t.nu_max[i];
    const float param = t.param[i];
    const ElementUpdate next = adamw(param, t.grad[i], moments, t.weight_decay);
    t.out[i] = kWriteParams ? param + next.update : next.update;
    t.mu_out[i] = next.moments.mu;
    t.nu_out[i] = next.moments.nu;
    if (kAmsgrad != Amsgrad::kOff) t.nu_max_out[i] = next.moments.nu_max;
  }
}

using UpdateTileFn = void (*)(const AdamWScalars&, const Tile&);

template <Amsgrad kAmsgrad>
UpdateTileFn SelectUpdateTile(bool nesterov, bool write_params) {
  if (nesterov) {
    return write_params ? UpdateTile<kAmsgrad, true, true> : UpdateTile<kAmsgrad, true, false>;
  }
  return write_params ? UpdateTile<kAmsgrad, false, true> : UpdateTile<kAmsgrad, false, false>;
}

UpdateTileFn SelectUpdateTile(const UpdateStep& step) {
  switch (step.amsgrad) {
    case Amsgrad::kUncorrected:
      return SelectUpdateTile<Amsgrad::kUncorrected>(step.nesterov, step.write_params);
    case Amsgrad::kCorrected:
      return SelectUpdateTile<Amsgrad::kCorrected>(step.nesterov, step.write_params);
    default:
      return SelectUpdateTile<Amsgrad::kOff>(step.nesterov, step.write_params);
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

// A skipped step: state and parameters keep their bits, the update is -0.0, which leaves every
// parameter, +0.0 and -0.0 alike, as it is under addition.
void SkipBlock(const UpdateStep& step, const UpdateBlock& block) {
  const std::int64_t n = block.num_elements;
  if (step.write_params) {
    CopyUnlessSame(block.param, block.out, n * SizeOf(block.param_dtype));
  } else if (block.param_dtype == DType::kFloat32) {
    for (std::int64_t i = 0; i < n; ++i) static_cast<float*>(block.out)[i] = -0.0f;
  } else {
    // bfloat16 and float16 share the pattern of -0.0.
    for (std::int64_t i = 0; i < n; ++i) static_cast<Word16*>(block.out)[i] = 0x8000u;
  }
  KeepMoment(step.mu_dtype, block.mu, block.mu_out, n);
  KeepMoment(step.nu_dtype, block.nu, block.nu_out, n);
  if (step.amsgrad != Amsgrad::kOff) {
    KeepMoment(step.nu_dtype, block.nu_max, block.nu_max_out, n);
  }
  if (block.copy_out != nullptr) {
    CopyUnlessSame(block.copy, block.copy_out, n * SizeOf(block.copy_dtype));
  }
  if (step.has_ema) CopyUnlessSame(block.ema, block.ema_out, n * SizeOf(DType::kFloat32));
}

// What of a tile is not float32 in memory, as float32.
struct TileBuffers {
  alignas(64) float param[kTileElements];
  alignas(64) float grad[kTileElements];
  alignas(64) float mu[kTileElements];
  alignas(64) float nu[kTileElements];
  alignas(64) float nu_max[kTileElements];
  alignas(64) float out[kTileElements];
  alignas(64) Word32 noise[kTileElements];
};

const float* MomentTile(const void* moment, DType dtype, std::int64_t begin, std::int64_t n,
                        float* buffer) {
  return moment == nullptr ? kZeros : TileOf(moment, dtype, begin, n, buffer);
}

// Where the new values go: to the target itself, or to `buffer` on their way.
float* TileFor(void* target, DType dtype, std::int64_t begin, float* buffer) {
  return dtype == DType::kFloat32 ? static_cast<float*>(target) + begin : buffer;
}

Tile LoadTiles(const UpdateStep& step, const UpdateBlock& block, std::int64_t begin, std::int64_t n,
               TileBuffers* buffers) {
  const float* grad = TileOf(block.grad, block.grad_dtype, begin, n, buffers->grad);
  grad = UnscaleTile(step.unscale, grad, n, buffers->grad);
  Tile tile;
  tile.param = TileOf(block.param, block.param_dtype, begin, n, buffers->param);
  tile.grad = ClipTile(step.clip, grad, n, buffers->grad);
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
  tile.weight_decay = block.weight_decay;
  return tile;
}

void StoreMoments(const UpdateStep& step, const UpdateBlock& block, const Tile& tile,
                  std::int64_t begin, TileBuffers* buffers) {
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

void StoreOut(const UpdateStep& step, const UpdateBlock& block, const Tile& tile,
              std::int64_t begin, TileBuffers* buffers) {
  if (step.stochastic_params && step.write_params && block.param_dtype == DType::kBfloat16) {
    FillNoise<kTileElements>(block.noise.OfParams(), block, begin, tile.n, buffers->noise);
    StoreTileStochastic<Bfloat16>(tile.out, buffers->noise, kParamNoiseShift, block.out, begin,
                                  tile.n);
  } else {
    StoreTileAs(block.param_dtype, tile.out, block.out, begin, tile.n);
  }
}

// Of the new parameters as they are stored, or will be when the stored updates are added to them.
void UpdateEma(const UpdateStep& step, const UpdateBlock& block, const Tile& tile,
               std::int64_t begin, TileBuffers* buffers) {
  const std::int64_t n = tile.n;
  const float* param = TileOf(block.out, block.param_dtype, begin, n, buffers->out);
  if (!step.write_params) {
    AddTiles(tile.param, param, n, buffers->out);
    RoundTile(block.param_dtype, n, buffers->out);
    param = buffers->out;
  }
  const Ema next_ema = step.ema;
  const float* const ema = block.ema + begin;
  float* const ema_out = block.ema_out + begin;
  JFA_ELEMENTWISE
  for (std::int64_t i = 0; i < n; ++i) ema_out[i] = next_ema(ema[i], param[i]);
}

// Whether the update loop writes all results where they belong.
bool NeedsNoStores(const UpdateStep& step, const UpdateBlock& block) {
  constexpr DType kF32 = DType::kFloat32;
  return block.param_dtype == kF32 && step.mu_dtype == kF32 && step.nu_dtype == kF32 &&
         block.copy_out == nullptr && !step.has_ema;
}

void StoreTiles(const UpdateStep& step, const UpdateBlock& block, const Tile& tile,
                std::int64_t begin, TileBuffers* buffers) {
  StoreMoments(step, block, tile, begin, buffers);
  StoreOut(step, block, tile, begin, buffers);
  if (block.copy_out != nullptr) {
    StoreTileAs(block.copy_dtype, tile.out, block.copy_out, begin, tile.n);
  }
  if (step.has_ema) UpdateEma(step, block, tile, begin, buffers);
}

}  // namespace

void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block) {
  if (step.skip) return SkipBlock(step, block);
  TileBuffers buffers;
  const UpdateTileFn update_tile = SelectUpdateTile(step);
  const bool direct = NeedsNoStores(step, block);
  for (std::int64_t begin = 0; begin < block.num_elements; begin += kTileElements) {
    const std::int64_t left = block.num_elements - begin;
    const std::int64_t n = left < kTileElements ? left : kTileElements;
    const Tile tile = LoadTiles(step, block, begin, n, &buffers);
    update_tile(step.scalars, tile);
    if (!direct) StoreTiles(step, block, tile, begin, &buffers);
  }
}

}  // namespace jfa::cpu::JFA_ISA
