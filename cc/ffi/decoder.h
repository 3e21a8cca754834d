// Typed views of the buffers and attributes of an XLA call.
#ifndef JAX_FUSED_ADAMW_CC_FFI_DECODER_H_
#define JAX_FUSED_ADAMW_CC_FFI_DECODER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/dtype.h"
#include "core/scalars.h"
#include "core/stats.h"
#include "xla/ffi/api/ffi.h"

namespace jfa {

namespace ffi = xla::ffi;

inline ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_fused_adamw: " + message);
}

// Of an error text, empty on success.
inline ffi::Error InternalError(const std::string& text) {
  if (text.empty()) return ffi::Error::Success();
  return ffi::Error::Internal("jax_fused_adamw: " + text);
}

// 32-bit words of a StatsRow.
inline constexpr std::int64_t kRowElements = 3;

// Products with as many members fit 64 bits.
inline constexpr std::int64_t kMaxMembers = std::int64_t{1} << 40;

inline std::string LeafName(const char* kind, std::size_t leaf) {
  return std::string(kind) + " of leaf " + std::to_string(leaf);
}

inline ffi::DataType FfiDType(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ffi::F32;
    case DType::kBfloat16:
      return ffi::BF16;
    case DType::kFloat16:
      return ffi::F16;
    default:
      return ffi::F64;
  }
}

// Pulls typed views out of the two variadic frames and remembers the first failure.
class Decoder {
 public:
  Decoder(ffi::RemainingArgs args, ffi::RemainingRets rets, std::int64_t members)
      : args_(args), rets_(rets), members_(members) {}

  const ffi::Error& error() const { return error_; }
  bool ok() const { return error_.success(); }
  std::int64_t members() const { return members_; }

  ffi::AnyBuffer Argument(std::size_t index) {
    auto buffer = args_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) Fail(buffer.error().message());
    return buffer.has_value() ? *buffer : *args_.get<ffi::AnyBuffer>(0);
  }

  ffi::AnyBuffer Result(std::size_t index) {
    auto buffer = rets_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) Fail(buffer.error().message());
    return buffer.has_value() ? **buffer : *args_.get<ffi::AnyBuffer>(0);
  }

  // An operand of `value_elements` elements, or of that many for each member.
  template <typename T>
  ScalarOperand<T> Scalar(std::size_t index, ffi::DataType dtype, const char* name,
                          std::size_t value_rank = 0, std::int64_t value_elements = 1) {
    const ffi::AnyBuffer buffer = Argument(index);
    const bool per_member = buffer.dimensions().size() == value_rank + 1;
    const std::int64_t expected = per_member ? members_ * value_elements : value_elements;
    if (buffer.element_type() != dtype ||
        (buffer.dimensions().size() != value_rank && !per_member) ||
        static_cast<std::int64_t>(buffer.element_count()) != expected) {
      Fail(std::string(name) + ": expected one value, or one for each member");
    }
    return {static_cast<const T*>(buffer.untyped_data()), per_member};
  }

  // A result of that many elements.
  template <typename T>
  T* Values(std::size_t index, ffi::DataType dtype, std::int64_t num_elements, const char* name) {
    const ffi::AnyBuffer buffer = Result(index);
    if (buffer.element_type() != dtype ||
        static_cast<std::int64_t>(buffer.element_count()) != num_elements) {
      Fail(std::string(name) + ": expected " + std::to_string(num_elements) + " elements, got " +
           std::to_string(buffer.element_count()));
    }
    return static_cast<T*>(buffer.untyped_data());
  }

  // Rows as JAX has them.
  StatsRow* Rows(std::size_t index, std::int64_t num_rows, const char* name) {
    return reinterpret_cast<StatsRow*>(
        Values<Word32>(index, ffi::U32, num_rows * kRowElements, name));
  }

  DType LeafDType(const ffi::AnyBuffer& buffer, const char* kind, std::size_t leaf) {
    switch (buffer.element_type()) {
      case ffi::F32:
        return DType::kFloat32;
      case ffi::BF16:
        return DType::kBfloat16;
      case ffi::F16:
        return DType::kFloat16;
      case ffi::F64:
        return DType::kFloat64;
      default:
        Fail(LeafName(kind, leaf) + ": expected float32, bfloat16, float16 or float64");
        return DType::kFloat32;
    }
  }

  void CheckLike(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& param, ffi::DataType dtype,
                 const char* kind, std::size_t leaf) {
    if (buffer.element_count() != param.element_count()) {
      Fail(LeafName(kind, leaf) + ": expected " + std::to_string(param.element_count()) +
           " elements, got " + std::to_string(buffer.element_count()));
    }
    if (buffer.element_type() != dtype) Fail(LeafName(kind, leaf) + ": unexpected dtype");
  }

  // An operand or result of each leaf that is of the same shape as the parameter.
  const void* Like(std::size_t index, const ffi::AnyBuffer& param, ffi::DataType dtype,
                   const char* kind, std::size_t leaf) {
    const ffi::AnyBuffer buffer = Argument(index);
    CheckLike(buffer, param, dtype, kind, leaf);
    return buffer.untyped_data();
  }

  void* ResultLike(std::size_t index, const ffi::AnyBuffer& param, ffi::DataType dtype,
                   const char* kind, std::size_t leaf) {
    const ffi::AnyBuffer buffer = Result(index);
    CheckLike(buffer, param, dtype, kind, leaf);
    return buffer.untyped_data();
  }

  void Fail(const std::string& message) {
    if (ok()) error_ = Invalid(message);
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::int64_t members_;
  ffi::Error error_ = ffi::Error::Success();
};

// The part of the binding that every handler has.
template <typename Binding>
auto BindAll(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().Attrs();
}

// Reads one attribute into `value`; returns whether it was there, with this type.
template <typename T, typename Value>
bool Get(const ffi::Dictionary& attributes, const char* name, Value* value) {
  const ffi::ErrorOr<T> found = attributes.get<T>(name);
  if (found.has_value()) *value = static_cast<Value>(*found);
  return found.has_value();
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_FFI_DECODER_H_
