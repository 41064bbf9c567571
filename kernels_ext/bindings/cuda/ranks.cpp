// How does Python hold the boxes through which GPUs that share a model reach one another? A class of torch.classes: one for each group.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstring>

#include "device.h"
#include "../../cuda/ranks/ranks.h"

namespace {

using at::Tensor;

void require(const char* what, cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();  // told here
  TORCH_CHECK(error == cudaSuccess, "boxes of GPUs that share a model: ", what, ": ", cudaGetErrorString(error));
}

class BoxesObject : public torch::CustomClassHolder {
 public:
  // Memory of this process on a device, for `count` ranks of which it is number `index`.
  BoxesObject(int64_t device, int64_t index, int64_t count) : device_(device) {
    TORCH_CHECK_VALUE(count >= 2 && count <= kMostRanks && index >= 0 && index < count, "boxes are of 2 to ", int(kMostRanks),
                      " ranks, got rank ", index, " of ", count);
    const c10::cuda::CUDAGuard guard(device_);
    ranks_.index = index, ranks_.count = count;
    const int64_t bytes = mlspec_cuda_box_bytes(count);
    require("no memory", cudaMalloc(&ranks_.boxes[index], bytes + 2 * sizeof(int32_t)));
    own_ = ranks_.boxes[index];
    ranks_.state = reinterpret_cast<int32_t*>(static_cast<char*>(own_) + bytes);
    require("zeros", cudaMemset(own_, 0, bytes + 2 * sizeof(int32_t)));
    require("zeros", cudaDeviceSynchronize());
  }

  ~BoxesObject() override {
    const c10::cuda::CUDAGuard guard(device_);
    for (int rank = 0; rank < ranks_.count; ++rank)
      if (ranks_.boxes[rank] && ranks_.boxes[rank] != own_) cudaIpcCloseMemHandle(ranks_.boxes[rank]);
    cudaFree(own_);
    cudaGetLastError();
  }

  // uint8 [64] on the CPU: what another process opens the box by.
  Tensor handle() const {
    const c10::cuda::CUDAGuard guard(device_);
    cudaIpcMemHandle_t own;
    require("no handle", cudaIpcGetMemHandle(&own, own_));
    Tensor out = at::empty({int64_t(sizeof own)}, at::kByte);
    std::memcpy(out.mutable_data_ptr(), &own, sizeof own);
    return out;
  }

  // The box of another rank, by its handle.
  void open(int64_t rank, const Tensor& handle) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < ranks_.count && rank != ranks_.index && !ranks_.boxes[rank], "box of rank ", rank,
                      ": it is this one's, open, or of nobody");
    TORCH_CHECK_VALUE(handle.is_cpu() && handle.scalar_type() == at::kByte && handle.numel() == int64_t(sizeof(cudaIpcMemHandle_t)),
                      "a handle is uint8 [", sizeof(cudaIpcMemHandle_t), "] on the CPU");
    const c10::cuda::CUDAGuard guard(device_);
    cudaIpcMemHandle_t other;
    std::memcpy(&other, handle.const_data_ptr(), sizeof other);
    require("another's cannot be opened", cudaIpcOpenMemHandle(&ranks_.boxes[rank], other, cudaIpcMemLazyEnablePeerAccess));
  }

  Tensor sum(const Tensor& x) const {
    constexpr const char* op = "sum_ranks";
    check(op, x, x.numel());
    const mlspec::CudaCall call(op, x);
    Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return y;
    call.check(mlspec_cuda_sum_ranks(&ranks_, x.const_data_ptr(), x.numel(), y.mutable_data_ptr(), call.stream(), call.overlap()));
    return y;
  }

  Tensor gather(const Tensor& x) const {
    constexpr const char* op = "gather_ranks";
    TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected [n, width]");
    check(op, x, x.size(1));
    const mlspec::CudaCall call(op, x);
    Tensor y = at::empty({x.size(0), x.size(1) * ranks_.count}, x.options());
    if (x.numel() == 0) return y;
    call.check(mlspec_cuda_gather_ranks(&ranks_, x.const_data_ptr(), x.size(0), x.size(1), y.mutable_data_ptr(), call.stream(), call.overlap()));
    return y;
  }

 private:
  void check(const char* op, const Tensor& x, int64_t width) const {
    mlspec::check_dtype(op, "x", x, at::kBFloat16);
    mlspec::check_contiguous(op, "x", x);
    TORCH_CHECK_VALUE(x.is_cuda() && x.device().index() == device_, op, ": x is on ", x.device(), ", the boxes are on cuda:", int(device_));
    TORCH_CHECK_VALUE(width % kLineElements == 0, op, ": x has shape ", x.sizes(), ", its width has to be a multiple of ", int(kLineElements));
    if (x.numel() > 0) mlspec::check_aligned(op, "x", x, 8);
    for (int rank = 0; rank < ranks_.count; ++rank) TORCH_CHECK(ranks_.boxes[rank], op, ": the box of rank ", rank, " is not open");
  }

  c10::DeviceIndex device_;
  void* own_ = nullptr;
  mlspec_cuda_ranks ranks_{};
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mlspec, m) {
  m.class_<BoxesObject>("Boxes")
      .def(torch::init<int64_t, int64_t, int64_t>())
      .def("handle", &BoxesObject::handle)
      .def("open", &BoxesObject::open)
      .def("sum", &BoxesObject::sum)
      .def("gather", &BoxesObject::gather);
}
