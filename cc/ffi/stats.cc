#include "ffi/stats.h"

#include <cstddef>

#include "ffi/decoder.h"

namespace jfa {
namespace {

constexpr std::int64_t kRowElements = 3;

ffi::Error CheckMembers(std::int64_t members) {
  if (members >= 1 && members <= kMaxMembers) return ffi::Error::Success();
  return Invalid("members must be 1 or more");
}

// Rows as JAX has them, of the operand's number.
StatsRow* Rows(Decoder& decoder, std::size_t index, std::int64_t num_rows, const char* name) {
  return reinterpret_cast<StatsRow*>(
      decoder.Values<Word32>(index, ffi::U32, num_rows * kRowElements, name));
}

}  // namespace

ffi::ErrorOr<AnalyzeOperands> DecodeAnalyze(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                            ffi::Dictionary dictionary) {
  AnalyzeOperands operands{};
  if (!Get<std::int64_t>(dictionary, "members", &operands.members) ||
      !Get<std::int64_t>(dictionary, "chunk_elements", &operands.chunk_elements)) {
    return ffi::Unexpected(Invalid("an attribute is missing or of another type"));
  }
  const ffi::Error members = CheckMembers(operands.members);
  if (members.failure()) return ffi::Unexpected(members);
  if (operands.chunk_elements < kStatsTileElements ||
      operands.chunk_elements % kStatsTileElements != 0) {
    return ffi::Unexpected(Invalid("chunk_elements must be a multiple of a tile"));
  }
  if (args.size() < 1 || rets.size() != 1) {
    return ffi::Unexpected(Invalid("expected gradient_scale, gradients and one result"));
  }
  Decoder decoder(args, rets, operands.members);
  operands.gradient_scale = decoder.Scalar<float>(0, ffi::F32, "gradient_scale");
  for (std::size_t i = 1; i < args.size() && decoder.ok(); ++i) {
    const ffi::AnyBuffer grad = decoder.Argument(i);
    const std::int64_t num_elements = static_cast<std::int64_t>(grad.element_count());
    if (num_elements % operands.members != 0) {
      decoder.Fail(LeafName("gradient", i - 1) + ": not divisible into members");
    }
    const DType dtype = decoder.LeafDType(grad, "gradient", i - 1);
    operands.leaves.push_back({grad.untyped_data(), num_elements, dtype});
  }
  operands.rows = Rows(decoder, 0, operands.members * operands.RowsPerMember(), "rows");
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

ffi::ErrorOr<MergeOperands> DecodeMerge(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                        ffi::Dictionary dictionary) {
  MergeOperands operands{};
  using Numbers = ffi::Span<const std::int64_t>;
  Numbers first_rows;
  Numbers num_rows;
  if (!Get<std::int64_t>(dictionary, "members", &operands.members) ||
      !Get<Numbers>(dictionary, "first_rows", &first_rows) ||
      !Get<Numbers>(dictionary, "num_rows", &num_rows)) {
    return ffi::Unexpected(Invalid("an attribute is missing or of another type"));
  }
  const ffi::Error members = CheckMembers(operands.members);
  if (members.failure()) return ffi::Unexpected(members);
  if (args.size() != 1 || rets.size() != 6 || first_rows.size() != num_rows.size()) {
    return ffi::Unexpected(Invalid("expected one operand, six results and equal segments"));
  }
  Decoder decoder(args, rets, operands.members);
  const ffi::AnyBuffer rows = decoder.Argument(0);
  const std::int64_t all_rows = static_cast<std::int64_t>(rows.element_count()) / kRowElements;
  if (rows.element_type() != ffi::U32 || all_rows % operands.members != 0) {
    decoder.Fail("rows: expected uint32 rows of three, as many for each member");
  }
  operands.rows = static_cast<const StatsRow*>(rows.untyped_data());
  operands.rows_per_member = all_rows / operands.members;
  for (std::size_t i = 0; i < first_rows.size(); ++i) {
    if (first_rows[i] < 0 || num_rows[i] < 0 ||
        num_rows[i] > operands.rows_per_member - first_rows[i]) {
      decoder.Fail("segment " + std::to_string(i) + " is outside of the rows");
    }
    operands.segments.push_back({first_rows[i], num_rows[i]});
  }
  const std::int64_t reports = operands.members * static_cast<std::int64_t>(num_rows.size());
  operands.norm = decoder.Values<float>(0, ffi::F32, reports, "norm");
  operands.scaled_norm = decoder.Values<float>(1, ffi::F32, reports, "scaled_norm");
  operands.max_abs = decoder.Values<float>(2, ffi::F32, reports, "max_abs");
  operands.nonfinite = decoder.Values<int>(3, ffi::S32, reports, "nonfinite");
  operands.merged = Rows(decoder, 4, reports, "merged");
  if (decoder.ok()) {
    operands.scratch = Rows(decoder, 5, operands.members * operands.ScratchPerMember(), "scratch");
  }
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

}  // namespace jfa
