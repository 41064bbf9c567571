// What do the bindings of all CPU linears share? Activations packed, output features handed out to threads, parts checked.
#pragma once
#include "../operands.h"

namespace mlspec {

inline int64_t round_up(int64_t items, int64_t step) { return (items + step - 1) / step; }

// What a linear does to its activations, with the kernel that multiplies them.
struct Form {
  mlspec_linear_fn kernel;
  mlspec_acts_kind kind;
  int64_t group, bits;
  int64_t outliers = 0;  // so many of the last inputs stand in the activations twice, with 8 bits where the others have 4
  double clip = 1;       // of 4-bit activations
};

// float x [..., in] -> [..., out] in its dtype; args hold the weight and its sizes. Checks x and bias.
at::Tensor multiply(const char* op, const Form& form, const at::Tensor& x, mlspec_linear_args args,
                    const std::optional<at::Tensor>& bias);

void check_weight_part(const char* op, const char* name, const at::Tensor& t, at::ScalarType dtype, at::IntArrayRef shape);

}  // namespace mlspec
