#include "ffi/stats.h"

#include <cstddef>

#include "ffi/decoder.h"

namespace jfa {
namespace {

constexpr std::size_t kNumMergeResults = 6;

ffi::ErrorOr<std::int64_t> DecodeMembers(const ffi::Dictionary& attributes) {
  std::int64_t members = 0;
  const bool found = Get<std::int64_t>(attributes, "members", &members);
  if (found && members >= 1 && members <= kMaxMembers) return members;
  return ffi::Unexpected(Invalid("members must be 1 or more"));
}

// All but the rows themselves, of which each member has `rows_per_member`.
MergeOperands DecodeReports(Decoder& decoder, const ffi::Dictionary& attributes,
                            std::int64_t rows_per_member) {
  MergeOperands operands{};
  operands.members = decoder.members();
  operands.rows_per_member = rows_per_member;
  using Numbers = ffi::Span<const std::int64_t>;
  Numbers first_rows;
  Numbers num_rows;
  if (!Get<Numbers>(attributes, "first_rows", &first_rows) ||
      !Get<Numbers>(attributes, "num_rows", &num_rows) || first_rows.size() != num_rows.size()) {
    decoder.Fail("first_rows and num_rows must have one entry for each segment");
    return operands;
  }
  for (std::size_t i = 0; i < first_rows.size(); ++i) {
    if (first_rows[i] < 0 || num_rows[i] < 0 || num_rows[i] > rows_per_member - first_rows[i]) {
      decoder.Fail("segment " + std::to_string(i) + " is outside of the rows");
      return operands;
    }
    operands.segments.push_back({first_rows[i], num_rows[i]});
  }
  const std::int64_t reports = operands.members * static_cast<std::int64_t>(num_rows.size());
  operands.norm = decoder.Values<float>(0, ffi::F32, reports, "norm");
  operands.scaled_norm = decoder.Values<float>(1, ffi::F32, reports, "scaled_norm");
  operands.max_abs = decoder.Values<float>(2, ffi::F32, reports, "max_abs");
  operands.nonfinite = decoder.Values<int>(3, ffi::S32, reports, "nonfinite");
  operands.merged = decoder.Rows(4, reports, "merged");
  operands.scratch = decoder.Rows(5, operands.members * operands.ScratchPerMember(), "scratch");
  return operands;
}

AnalyzeOperands DecodeGradients(Decoder& decoder, const ffi::Dictionary& attributes,
                                std::size_t num_leaves) {
  AnalyzeOperands operands{};
  operands.members = decoder.members();
  if (!Get<std::int64_t>(attributes, "chunk_elements", &operands.chunk_elements) ||
      operands.chunk_elements < kStatsTileElements ||
      operands.chunk_elements % kStatsTileElements != 0) {
    decoder.Fail("chunk_elements must be a multiple of a tile");
    return operands;
  }
  operands.gradient_scale = decoder.Scalar<float>(0, ffi::F32, "gradient_scale");
  for (std::size_t leaf = 0; leaf < num_leaves && decoder.ok(); ++leaf) {
    const ffi::AnyBuffer grad = decoder.Argument(leaf + 1);
    const std::int64_t num_elements = static_cast<std::int64_t>(grad.element_count());
    if (num_elements % operands.members != 0) {
      decoder.Fail(LeafName("gradient", leaf) + ": not divisible into members");
    }
    const DType dtype = decoder.LeafDType(grad, "gradient", leaf);
    operands.leaves.push_back({grad.untyped_data(), num_elements, dtype});
  }
  return operands;
}

}  // namespace

ffi::ErrorOr<StatsOperands> DecodeAnalyze(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                          ffi::Dictionary attributes) {
  const ffi::ErrorOr<std::int64_t> members = DecodeMembers(attributes);
  if (!members.has_value()) return ffi::Unexpected(members.error());
  if (args.size() < 1 || rets.size() != kNumMergeResults + 1) {
    return ffi::Unexpected(Invalid("expected gradient_scale, gradients and seven results"));
  }
  Decoder decoder(args, rets, *members);
  StatsOperands operands{DecodeGradients(decoder, attributes, args.size() - 1), {}};
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  const std::int64_t rows_per_member = operands.analyze.RowsPerMember();
  operands.merge = DecodeReports(decoder, attributes, rows_per_member);
  operands.analyze.rows = decoder.Rows(kNumMergeResults, *members * rows_per_member, "rows");
  operands.merge.rows = operands.analyze.rows;
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

ffi::ErrorOr<MergeOperands> DecodeMerge(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                        ffi::Dictionary attributes) {
  const ffi::ErrorOr<std::int64_t> members = DecodeMembers(attributes);
  if (!members.has_value()) return ffi::Unexpected(members.error());
  if (args.size() != 1 || rets.size() != kNumMergeResults) {
    return ffi::Unexpected(Invalid("expected rows and six results"));
  }
  Decoder decoder(args, rets, *members);
  const ffi::AnyBuffer rows = decoder.Argument(0);
  const std::int64_t num_elements = static_cast<std::int64_t>(rows.element_count());
  if (rows.element_type() != ffi::U32 || num_elements % (kRowElements * *members) != 0) {
    decoder.Fail("rows: expected uint32 rows of three, as many for each member");
  }
  MergeOperands operands =
      DecodeReports(decoder, attributes, num_elements / kRowElements / *members);
  operands.rows = static_cast<const StatsRow*>(rows.untyped_data());
  if (!decoder.ok()) return ffi::Unexpected(decoder.error());
  return operands;
}

}  // namespace jfa
