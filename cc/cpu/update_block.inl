// The CPU kernel of the update. Included by one .cc for each instruction set, which defines
// JFA_ISA.
//
// A block is worked on in tiles. Low-precision gradients and parameters, and gradients that need a
// scale, pass through a float32 buffer of one tile, so the update loop sees float32 only and is
// instantiated for its options, not for every pair of dtypes. float32 buffers are used where they
// lie.
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

const float* MomentTile(const float* moment, std::int64_t begin) {
  return moment == nullptr ? kZeros : moment + begin;
}

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

void KeepMoment(const float* from, float* to, std::int64_t n) {
  const std::int64_t bytes = n * SizeOf(DType::kFloat32);
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
  KeepMoment(block.mu, block.mu_out, n);
  KeepMoment(block.nu, block.nu_out, n);
  if (step.amsgrad != Amsgrad::kOff) KeepMoment(block.nu_max, block.nu_max_out, n);
}

}  // namespace

void UpdateOneBlock(const UpdateStep& step, const UpdateBlock& block) {
  if (step.skip) return SkipBlock(step, block);
  alignas(64) float param_buffer[kTileElements];
  alignas(64) float grad_buffer[kTileElements];
  alignas(64) float out_buffer[kTileElements];
  const UpdateTileFn update_tile = SelectUpdateTile(step);
  const bool direct_out = block.param_dtype == DType::kFloat32;
  for (std::int64_t begin = 0; begin < block.num_elements; begin += kTileElements) {
    const std::int64_t left = block.num_elements - begin;
    const std::int64_t n = left < kTileElements ? left : kTileElements;
    const float* grad = TileOf(block.grad, block.grad_dtype, begin, n, grad_buffer);
    grad = UnscaleTile(step.unscale, grad, n, grad_buffer);
    Tile tile;
    tile.param = TileOf(block.param, block.param_dtype, begin, n, param_buffer);
    tile.grad = ClipTile(step.clip, grad, n, grad_buffer);
    tile.out = direct_out ? static_cast<float*>(block.out) + begin : out_buffer;
    tile.mu = MomentTile(block.mu, begin);
    tile.nu = MomentTile(block.nu, begin);
    tile.mu_out = block.mu_out + begin;
    tile.nu_out = block.nu_out + begin;
    tile.nu_max = MomentTile(block.nu_max, begin);
    tile.nu_max_out = step.amsgrad == Amsgrad::kOff ? nullptr : block.nu_max_out + begin;
    tile.n = n;
    tile.weight_decay = block.weight_decay;
    update_tile(step.scalars, tile);
    if (!direct_out) StoreTileAs(block.param_dtype, out_buffer, block.out, begin, n);
  }
}

}  // namespace jfa::cpu::JFA_ISA
