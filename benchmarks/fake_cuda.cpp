// A CUDA device whose memory is the host's and whose operations the CPU does: what the host does for a device, without one.
//
// In: nothing; loading this library registers it with a torch that was built for CPUs. Out: tensors on `cuda:0`. Creating and
// viewing them takes what it takes for any device; every other operation runs on CPU tensors with the same memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

// Blocks are kept and handed out again, as torch does on a GPU: the system's allocator would take longer than the call.
struct Block {
  void* memory;
  size_t size;
};

std::mutex lock;
std::unordered_map<size_t, std::vector<Block*>> unused;

void give_back(void* block) {
  const std::lock_guard<std::mutex> held(lock);
  unused[static_cast<Block*>(block)->size].push_back(static_cast<Block*>(block));
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = (bytes + 511) / 512 * 512;
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, DEVICE};
    const std::lock_guard<std::mutex> held(lock);
    auto& kept = unused[size];
    Block* block;
    if (kept.empty()) {
      block = new Block{std::aligned_alloc(512, size), size};
    } else {
      block = kept.back();
      kept.pop_back();
    }
    return {block->memory, block, &give_back, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;

at::Tensor here(const at::Tensor& x) {
  if (!x.defined() || x.device() != DEVICE) return x;
  // An operation may resize a result without elements.
  if (!x.numel()) return at::empty(x.sizes(), x.options().device(at::kCPU));
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

at::Tensor there(const at::Tensor& x) {
  if (!x.defined() || !x.is_cpu()) return x;
  auto* own = new at::Tensor(x);
  c10::DataPtr data(x.data_ptr(), own, [](void* kept) { delete static_cast<at::Tensor*>(kept); }, DEVICE);
  c10::Storage storage(c10::Storage::use_byte_size_t(), x.nbytes(), std::move(data), &memory, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), x.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
  return made;
}

c10::IValue moved(const c10::IValue& value, at::Tensor (*move)(const at::Tensor&)) {
  if (value.isTensor()) return move(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& each : value.toTensorVector()) found.push_back(move(each));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      found.push_back(each ? std::optional<at::Tensor>(move(*each)) : std::nullopt);
    return found;
  }
  return value.isDevice() ? c10::IValue(at::Device(at::kCPU)) : value;
}

c10::IValue resized(const c10::IValue& given, const c10::IValue& result) {
  if (given.isTensor() && given.toTensor().sizes() != result.toTensor().sizes()) {
    const at::Tensor made = there(result.toTensor());
    auto* own = given.toTensor().unsafeGetTensorImpl();
    own->set_storage_keep_dtype(made.storage());
    own->set_sizes_and_strides(made.sizes(), made.strides());
  }
  return given;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size(), first = stack->size() - count;
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  for (size_t k = 0; k < count; ++k) (*stack)[first + k] = moved(given[k], here);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    auto& result = (*stack)[first + r];
    const auto* alias = schema.returns()[r].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t k = 0; k < count; ++k) {
        const auto* own = schema.arguments()[k].alias_info();
        if (own != nullptr && own->beforeSets() == alias->beforeSets()) result = resized(given[k], result);
      }
    } else if (result.isTensor() || result.isTensorList()) {
      result = moved(result, there);
    }
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  auto to = here(self);
  to.copy_(here(source));
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("copy_", copy_);
}

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>);

}  // namespace
