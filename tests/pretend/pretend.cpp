// A pretend accelerator for torch: two devices whose tensors lie apart from the CPU's as far as torch can see. Each
// operation runs on the CPU over the same memory (nothing is copied), refuses tensors of different devices, and is
// counted, as are waits for the device and bytes that cross. Modes take away float64, operations, or memory.
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto OURS = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 2;

// ── Counts and modes; one lock, because autograd runs each device's backward pass in a thread of its own ──

std::mutex lock;
std::map<std::string, int64_t> operations, events;
int64_t used[DEVICES], peak[DEVICES], most[DEVICES];  // bytes; most: 0 for no limit
bool float64 = true, sorts_int64 = true;
std::set<std::string> refused;
std::set<const void*> pinned;
thread_local c10::DeviceIndex current = 0;

void count(const std::string& event, int64_t by = 1) {
  std::lock_guard<std::mutex> held(lock);
  events[event] += by;
}

void wait(const std::string& name) {
  std::lock_guard<std::mutex> held(lock);
  events["waits"]++;
  operations["wait: " + name]++;
}

void launch(const std::string& name) {
  std::lock_guard<std::mutex> held(lock);
  events["launches"]++;
  operations[name]++;
}

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == OURS; }

// ── Memory ──

struct Block {  // of our own, or that of a result which the CPU computed
  void* own;
  c10::Storage kept;
  int64_t bytes;
  c10::DeviceIndex index;
};

void take(int64_t bytes, c10::DeviceIndex index) {
  std::lock_guard<std::mutex> held(lock);
  TORCH_CHECK_WITH(OutOfMemoryError, !most[index] || used[index] + bytes <= most[index], "pretend out of memory. Tried to allocate ", bytes,
      " bytes. Device ", int(index), " has ", most[index], " bytes, of which ", most[index] - used[index], " are free.");
  used[index] += bytes;
  peak[index] = std::max(peak[index], used[index]);
}

void release(void* pointer) {
  std::unique_ptr<Block> block(static_cast<Block*>(pointer));
  free(block->own);
  std::lock_guard<std::mutex> held(lock);
  used[block->index] -= block->bytes;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    take(bytes, current);
    void* own = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {own, new Block{own, {}, int64_t(bytes), current}, &release, c10::Device(OURS, current)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard<std::mutex> held(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = used[index];
      (*bytes)[0].peak = peak[index];
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { peak[index] = used[index]; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    size_t all = most[index] ? most[index] : int64_t(1) << 34;
    return {all - used[index], all};
  }
};
Memory memory;
REGISTER_ALLOCATOR(OURS, &memory);

struct PinnedMemory final : c10::Allocator {
  static void give_back(void* pointer) {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(pointer);
    free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* own = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(own);
    return {own, own, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.count(pointer);
}

// ── What torch asks of a device ──

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return OURS; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(OURS, current);
    current = device.has_index() ? device.index() : current;
    return before;
  }
  c10::Device getDevice() const override { return {OURS, current}; }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream stream(c10::Device device) const {
    return c10::Stream(c10::Stream::DEFAULT, {OURS, device.has_index() ? device.index() : current});
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream next) const override { return next; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability found;
    if (!float64) found.capability_data.capability_bits &= ~((1ULL << c10::kIndex_Double) | (1ULL << c10::kIndex_ComplexDouble));
    return found;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count("synchronisations"); }
  void synchronizeEvent(void*) const override { count("synchronisations"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { count("synchronisations"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void*) const override { return {OURS, current}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index < 0 ? current : index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard held(storage.device());
    at::native::resize_bytes_nocuda(storage, bytes);
  }
};

// ── Tensors of the device seen as the CPU's, and results of the CPU given to the device ──

at::Tensor on_cpu(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(false);
  if (!tensor.numel() && tensor.dim() == 1) return at::empty({0}, options);  // `out=` may make it larger
  auto* start = static_cast<char*>(tensor.storage().mutable_data());
  return at::from_blob(start + tensor.storage_offset() * tensor.element_size(), tensor.sizes(), tensor.strides(), options);
}

void require_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(float64 || type != at::kDouble, "Cannot convert a pretend tensor to float64: the device has none. Please use float32.");
}

at::Tensor on_device(const at::Tensor& result, c10::DeviceIndex index) {
  if (!result.defined()) return result;
  require_type(result.scalar_type());
  const auto& storage = result.storage();
  take(storage.nbytes(), index);
  c10::DataPtr data(storage.mutable_data(), new Block{nullptr, storage, int64_t(storage.nbytes()), index}, &release, c10::Device(OURS, index));
  auto made = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), &memory, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(made), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  return tensor;
}

// ── Every operation that has no kernel below ──

const std::set<std::string> WAIT = {"aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::_is_all_true", "aten::_is_any_true", "aten::repeat_interleave"};
// Indices may lie on the CPU. Only of `_index_put_impl_` the copies and masks are counted here: that of the others is
// done by operations of its own.
const std::string PUT = "aten::_index_put_impl_", INDEX = "aten::index";
const std::set<std::string> SORT = {"aten::sort", "aten::topk", "aten::_unique2", "aten::kthvalue", "aten::median"};

struct Argument {
  at::Tensor original, seen;
  bool written;
};

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  const std::string full = schema.operator_name().overload_name.empty() ? name : name + "." + schema.operator_name().overload_name;
  {
    std::lock_guard<std::mutex> held(lock);
    TORCH_CHECK_NOT_IMPLEMENTED(!refused.count(full) && !refused.count(name), "The operator '", full, "' is not implemented for the pretend device.");
  }
  const bool puts = name == PUT;
  std::vector<Argument> ours;
  std::vector<at::Tensor> host;
  c10::DeviceIndex index = -1;
  bool masked = false;
  auto lowered = [&](const at::Tensor& tensor, bool written, bool listed) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (puts && listed) {
        count("to device");
        count("unpinned to device");
        count("bytes to device", tensor.nbytes());
      } else if (name == INDEX && listed) {
      } else if (tensor.dim() || name.rfind("aten::index", 0) == 0) {
        host.push_back(tensor);
      }
      return tensor;
    }
    TORCH_CHECK(index < 0 || index == tensor.device().index(), "Expected all tensors to be on the same device, but ", full,
        " got pretend:", int(index), " and ", tensor.device());
    index = tensor.device().index();
    TORCH_CHECK_NOT_IMPLEMENTED(sorts_int64 || tensor.scalar_type() != at::kLong || !ours.empty() || !SORT.count(name), full, " does not sort int64 on the pretend device.");
    masked |= puts && listed && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    ours.push_back({tensor, on_cpu(tensor), written});
    return ours.back().seen;
  };
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      value = lowered(value.toTensor(), written, false);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lowered(tensor, written, true));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
        list.push_back(tensor ? std::optional<at::Tensor>(lowered(*tensor, written, true)) : tensor);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == OURS) {
      index = value.toDevice().has_index() ? value.toDevice().index() : current;
      value = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(host.empty(), "Expected all tensors to be on the same device, but ", full, " got one on the cpu of shape ", host[0].sizes(), " beside those of the pretend device");
  if (index < 0) index = current;
  launch(full);
  masked &= puts && (*stack)[first + 2].toTensor().numel() != 1;  // one number is filled in, whatever the mask says
  if (WAIT.count(name) || masked) wait(full);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto& one : ours) {
    if (one.written && (one.seen.sizes() != one.original.sizes() || one.seen.storage().data() == nullptr ||
                        (!one.original.numel() && one.seen.numel()))) {
      c10::DeviceGuard held(one.original.device());  // whose memory is taken
      at::native::resize_(one.original, one.seen.sizes());
      on_cpu(one.original).copy_(one.seen);
    }
  }
  auto raised = [&](const at::Tensor& result, const c10::AliasInfo* alias) -> at::Tensor {
    if (!result.defined()) return result;
    for (const auto& one : ours) {
      if (result.is_same(one.seen)) return one.original;
    }
    for (const auto& one : ours) {
      if (alias && !alias->isWrite() && result.storage().data() == one.seen.storage().data()) {  // a view
        return at::as_strided(one.original, result.sizes(), result.strides(), one.original.storage_offset() + result.storage_offset());
      }
      if (result.numel() && result.storage().data() == one.seen.storage().data()) return on_device(result.clone(), index);
    }
    return on_device(result, index);
  };
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[stack->size() - returns.size() + i];
    if (value.isTensor()) {
      value = raised(value.toTensor(), returns[i].alias_info());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(raised(tensor, returns[i].alias_info()));
      value = list;
    }
  }
}

// ── Memory, views, copies and attention ──

c10::DeviceIndex index_of(std::optional<at::Device> device) { return device && device->has_index() ? device->index() : current; }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_type(type.value_or(at::get_default_dtype_as_scalartype()));
  c10::DeviceGuard held(c10::Device(OURS, index_of(device)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  require_type(type.value_or(at::get_default_dtype_as_scalartype()));
  c10::DeviceGuard held(c10::Device(OURS, index_of(device)));
  return at::detail::empty_strided_generic(size, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (!is_ours(to)) {
    if (!non_blocking || !is_pinned(to.storage().data())) wait("copy to host");
    count("to host");
    count("bytes to host", self.nbytes());
  } else if (!is_ours(self)) {
    if (!non_blocking || !is_pinned(self.storage().data())) count("unpinned to device");
    count("to device");
    count("bytes to device", self.nbytes());
  } else {
    launch("aten::copy_");
  }
  (is_ours(to) ? on_cpu(to) : to).copy_(is_ours(self) ? on_cpu(self) : self);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& tensor) {
  wait("item");
  count("to host");
  count("bytes to host", tensor.element_size());
  return on_cpu(tensor).item();
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard held(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef strides) {
  return at::cpu::set_(self, storage, offset, size, strides);
}

// Attention is one launch, as in the kernels of real devices; with a gradient it is composed of others.
int64_t attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  bool learns = c10::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() || (mask && mask->requires_grad()));
  return static_cast<int64_t>(learns ? sdp::SDPBackend::math : sdp::SDPBackend::overrideable);
}

using Attended = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Attended attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout, bool causal,
    bool, std::optional<double> scale) {
  const auto device = q.device();
  for (const auto* other : {&k, &v, mask ? &*mask : &q}) {
    TORCH_CHECK(other->device() == device, "Expected all tensors to be on the same device, but attention got ", device, " and ", other->device());
  }
  launch("aten::scaled_dot_product_attention");
  auto seen = mask ? std::optional<at::Tensor>(on_cpu(*mask)) : std::nullopt;
  auto result = at::scaled_dot_product_attention(on_cpu(q), on_cpu(k), on_cpu(v), seen, dropout, causal, scale, q.size(1) != k.size(1));
  at::Tensor none;
  return {on_device(result, device.index()), none, none, none, 0, 0, none, none, none};
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more, c10::SymInt groups) {
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device, but a convolution got ", input.device(), " and ",
      weight.device());
  launch("aten::convolution");
  auto own = bias && bias->defined() ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt;
  auto result = at::convolution_symint(on_cpu(input), on_cpu(weight), own, stride, padding, dilation, transposed, more, groups);
  return on_device(result, input.device().index());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, kernels) {
  kernels.impl("convolution_overrideable", &convolution);
  kernels.impl("empty.memory_format", &empty);
  kernels.impl("empty_strided", &empty_strided);
  kernels.impl("as_strided", &as_strided);
  kernels.impl("view", &view);
  kernels.impl("_reshape_alias", &reshape_alias);
  kernels.impl("resize_", &resize);
  kernels.impl("_copy_from", &copy_from);
  kernels.impl("_copy_from_and_resize", &copy_from_and_resize);
  kernels.impl("_local_scalar_dense", &item);
  kernels.impl("set_.source_Storage_storage_offset", &set);
  // Two that CUDA, XPU and MPS have kernels for, and that torch would take apart here.
  kernels.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  kernels.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, kernels) { kernels.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }

// Types under autocast are those of CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, kernels) { kernels.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT32_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_OUT)
}

std::string json(const std::map<std::string, int64_t>& values) {
  std::string text = "{";
  for (const auto& [name, value] : values) text += (text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(value);
  return text + "}";
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_kernel)
}

// ── What the Python module calls ──

extern "C" {

void pretend_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

const char* pretend_counts() {
  static std::string text;
  std::lock_guard<std::mutex> held(lock);
  text = "[" + json(events) + ", " + json(operations) + "]";
  return text.c_str();
}

void pretend_limit(int index, long long bytes) { most[index] = bytes; }

void pretend_mode(bool with_float64, bool with_int64_sort, const char* without) {
  std::lock_guard<std::mutex> held(lock);
  float64 = with_float64;
  sorts_int64 = with_int64_sort;
  refused.clear();
  std::string names(without);
  for (size_t start = 0, end; start < names.size(); start = end + 1) {
    end = std::min(names.find('\n', start), names.size());
    refused.insert(names.substr(start, end - start));
  }
}
}
