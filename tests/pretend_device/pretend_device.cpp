// A device that computes on the processor and claims to be another one.
//
// Memory is ordinary memory under the device type PrivateUse1. Every kernel is the CPU's own: the
// fallback below gives it CPU tensors that share the memory of its arguments. Before that it refuses
// what CUDA refuses (tensors of several devices) and reports what a host would wait for.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/ATen.h>
#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

constexpr int MOST = 8;  // devices
constexpr DeviceType PRETEND = DeviceType::PrivateUse1;

// How many there are (PRETEND_DEVICES, two by default), and the one that this thread works with.
const c10::DeviceIndex COUNT = [] {
  const char* given = std::getenv("PRETEND_DEVICES");
  return static_cast<c10::DeviceIndex>(std::clamp(given ? std::atoi(given) : 2, 1, MOST));
}();
thread_local c10::DeviceIndex current = 0;

Device here() { return Device(PRETEND, current); }

void go_to(c10::DeviceIndex index) {
  TORCH_CHECK(index < COUNT, "invalid device ordinal ", index, ": there are ", COUNT);
  if (index >= 0) current = index;
}

bool is_pretend(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == PRETEND;
}

// --- what is reported --------------------------------------------------------------------------

std::atomic<bool> watched{false};
std::atomic<int64_t> operations{0};

// Calls Python's `pretend::waited`, which counts or raises.
void waits(const std::string& what) {
  if (!watched.load(std::memory_order_relaxed)) return;
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("pretend::waited", "")
                       .typed<void(c10::string_view)>();
  op.call(what);
}

// --- memory ------------------------------------------------------------------------------------

std::atomic<int64_t> bytes_now[MOST], bytes_peak[MOST];

// A piece of memory of a device, counted while it lives.
struct Counted {
  c10::DataPtr memory;
  int64_t bytes;
  c10::DeviceIndex device;

  Counted(c10::DataPtr given, size_t size, c10::DeviceIndex index)
      : memory(std::move(given)), bytes((size + 511) / 512 * 512), device(index) {
    const int64_t now = bytes_now[device] += bytes;
    int64_t peak = bytes_peak[device];
    while (now > peak && !bytes_peak[device].compare_exchange_weak(peak, now)) {
    }
  }
  ~Counted() { bytes_now[device] -= bytes; }
};

void drop_counted(void* context) { delete static_cast<Counted*>(context); }
void drop_storage(void* context) { delete static_cast<Storage*>(context); }

c10::DataPtr counted(c10::DataPtr memory, size_t bytes, Device device) {
  void* data = memory.get();
  return {data, new Counted(std::move(memory), bytes, device.index()), &drop_counted, device};
}

// The same memory under another device's name; keeps its owner alive.
c10::DataPtr renamed(const Storage& owner, Device device) {
  void* data = owner.mutable_data();
  return {data, new Storage(owner), &drop_storage, device};
}

// What a kernel of the processor made, as the device's memory from now on.
c10::DataPtr taken_over(const Storage& made, Device device) {
  return counted(renamed(made, device), made.nbytes(), device);
}

struct PretendAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    if (memory.get()) std::memset(memory.get(), 0xff, bytes);  // not a number, till it is written
    return counted(std::move(memory), bytes, here());
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
PretendAllocator allocator;
REGISTER_ALLOCATOR(PRETEND, &allocator);

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<const char*>(data));
  }
  c10::GetCPUAllocator()->raw_deleter()(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1)).release_context();
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

// --- random numbers ----------------------------------------------------------------------------

// A stream of random numbers of its own, as a card has.
struct PretendGenerator final : c10::GeneratorImpl {
  explicit PretendGenerator(at::Generator host)
      : GeneratorImpl(Device(PRETEND, 0), DispatchKeySet(DispatchKey::PrivateUse1)),
        inner(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  static DeviceType device_type() { return PRETEND; }
  PretendGenerator* clone_impl() const override { return new PretendGenerator(inner.clone()); }

  at::Generator inner;
};

const at::Generator& default_generator() {
  static auto made = at::make_generator<PretendGenerator>(at::detail::createCPUGenerator());
  return made;
}

at::Generator of_host(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == PRETEND,
      "Expected a 'pretend' device type for generator but found '", generator.device().type(), "'");
  return static_cast<PretendGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// --- what torch asks of a device -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return PRETEND; }
  Device exchangeDevice(Device device) const override {
    Device before = here();
    go_to(device.index());
    return before;
  }
  Device getDevice() const override { return here(); }
  void setDevice(Device device) const override { go_to(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  c10::Stream stream(Device device) const {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : here());
  }
  c10::Stream getStream(Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return given; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits("synchronize"); }
  void synchronizeEvent(void*) const override { waits("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { go_to(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    go_to(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(PRETEND, 0); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<PretendGenerator>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes()))
      std::memcpy(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --- the fallback ------------------------------------------------------------------------------

// A CPU tensor with the memory of another tensor.
Tensor on_cpu(const Tensor& tensor) {
  const auto& owner = tensor.storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner.nbytes(),
      renamed(owner, Device(DeviceType::CPU)), c10::GetCPUAllocator(), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      Storage(std::move(storage)), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

struct Shared {
  Tensor pretend, cpu;
  bool written;
};

// What a kernel made, under the device's name.
Tensor on_pretend(const Tensor& made, std::vector<Shared>& shared, Device device) {
  if (!made.defined() || made.device().type() != DeviceType::CPU) return made;
  Storage storage;
  for (auto& one : shared) {
    if (one.cpu.is_same(made)) return one.pretend;
    if (one.cpu.storage().unsafeGetStorageImpl() == made.storage().unsafeGetStorageImpl())
      storage = one.pretend.storage();  // a view
  }
  if (!storage) {
    const auto& owner = made.storage();
    storage = Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), owner.nbytes(), taken_over(owner, device),
        &allocator, /*resizable=*/true));
  }
  auto wrapped = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), made.dtype());
  wrapped.unsafeGetTensorImpl()->set_sizes_and_strides(
      made.sizes(), made.strides(), made.storage_offset());
  return wrapped;
}

// A kernel may have resized what it writes to.
void write_back(Shared& one) {
  auto* to = one.pretend.storage().unsafeGetStorageImpl();
  const auto& from = one.cpu.storage();
  if (to->data() != from.data()) {
    to->set_data_ptr_noswap(taken_over(from, one.pretend.device()));
    to->set_nbytes(from.nbytes());
  }
  if (one.pretend.sizes() != one.cpu.sizes() || one.pretend.strides() != one.cpu.strides())
    one.pretend.unsafeGetTensorImpl()->set_sizes_and_strides(
        one.cpu.sizes(), one.cpu.strides(), one.cpu.storage_offset());
}

const std::unordered_set<std::string> WAIT_FOR_RESULT = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "equal", "bincount", "multinomial", "histc",
    "linalg_cholesky_ex", "_assert_scalar"};
const std::unordered_set<std::string> STARTS_NOTHING = {
    "_local_scalar_dense", "_unsafe_view", "detach", "alias", "lift_fresh", "is_same_size", "resize_",
    "set_"};
const std::unordered_set<std::string> BY_INDEX = {
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"};
// Besides pointwise operations: an argument that may be a CPU tensor without dimensions.
const std::unordered_set<std::string> TAKE_CPU_SCALAR = {
    "fill_", "masked_fill_", "masked_fill", "index_put", "index_put_", "_index_put_impl_",
    "_unsafe_index_put", "index_fill_", "index_fill", "bernoulli_"};
// A processor without instructions for bfloat16 multiplies it ten times as slowly as float32. Sums
// are float32 in either way. (They arrive as `mm.out`.)
const std::unordered_set<std::string> PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"};

struct Call {
  const c10::OperatorHandle& op;
  std::string name;  // without namespace and overload
  bool scalars, by_index;
  std::vector<Shared> shared;
  std::string waited;
  std::optional<Device> device;  // of all tensors

  explicit Call(const c10::OperatorHandle& handle) : op(handle) {
    name = op.schema().name();
    name = name.substr(name.find("::") + 2);
    scalars = op.hasTag(at::Tag::pointwise) || TAKE_CPU_SCALAR.count(name);
    by_index = BY_INDEX.count(name);
    if (WAIT_FOR_RESULT.count(name)) waited = name;
  }

  void check(bool fits, const Tensor& tensor, const c10::Argument& argument) const {
    TORCH_CHECK(
        fits, "Expected all tensors to be on the same device, but found at least two devices, ",
        device.value_or(here()), " and ", tensor.device(), "! (argument '", argument.name(),
        "' of ", op.schema().name(), ")");
  }

  Tensor given(const Tensor& tensor, const c10::Argument& argument, bool index = false) {
    if (!tensor.defined()) return tensor;
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (is_pretend(tensor)) {
      if (!device) device = tensor.device();
      check(tensor.device() == *device, tensor, argument);
      const bool mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      if (index && mask && name != "index")  // which asks for `nonzero` itself
        waited = name + " by a mask";
      shared.push_back({tensor, on_cpu(tensor), written});
      return shared.back().cpu;
    }
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (index && tensor.is_cpu())
      waited = name + " by a tensor of the host";
    else
      check(
          !written && tensor.is_cpu() && (number || (scalars && tensor.dim() == 0)), tensor,
          argument);
    return tensor;
  }
};

// Whether an operation starts a kernel: a view, a name or an answer of the host does not.
bool starts_kernel(const c10::OperatorHandle& op, const std::string& name) {
  const auto& returns = op.schema().returns();
  const bool is_view = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](auto& one) {
    return one.alias_info() && !one.alias_info()->isWrite();
  });
  return !is_view && !STARTS_NOTHING.count(name);
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Call call(op);
  operations += starts_kernel(op, call.name);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue& value = (*stack)[begin + i];
    const auto& argument = arguments[i];
    if (value.isTensor()) {
      value = call.given(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& one : list) one = call.given(one, argument);
      value = list;
    } else if (value.isList() && argument.type()->str() == "Tensor?[]") {
      c10::List<std::optional<Tensor>> made;
      for (const IValue& one : value.toListRef())
        made.push_back(
            one.isNone() ? std::optional<Tensor>()
                         : call.given(one.toTensor(), argument, call.by_index));
      value = made;
    } else if (value.isDevice() && value.toDevice().type() == PRETEND) {
      if (value.toDevice().has_index()) call.device = value.toDevice();
      value = Device(DeviceType::CPU);
    } else if (argument.name() == "generator") {
      value = of_host(value.isNone() ? default_generator() : value.toGenerator());
    }
  }
  if (call.by_index && !is_pretend(call.shared.front().pretend)) call.waited.clear();
  if (!call.waited.empty()) waits(call.waited);
  Tensor narrow;
  if (PRODUCTS.count(call.name) && op.schema().overload_name() == "out")
    for (size_t i = begin; i < stack->size(); i++) {
      IValue& value = (*stack)[i];
      if (!value.isTensor() || value.toTensor().scalar_type() != at::kBFloat16) continue;
      narrow = value.toTensor();  // the last one is what is written to
      value = narrow.to(at::kFloat);
    }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (narrow.defined()) stack->back() = narrow.copy_(stack->back().toTensor());
  for (auto& one : call.shared)
    if (one.written) write_back(one);
  const Device device = call.device.value_or(here());
  const size_t results = stack->size() - op.schema().returns().size();
  for (size_t i = results; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = on_pretend(value.toTensor(), call.shared, device);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& one : list) one = on_pretend(one, call.shared, device);
      value = list;
    }
  }
}

// --- what cannot fall back ---------------------------------------------------------------------

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  operations++;
  if (from.numel() == 0) return to;
  if (is_pretend(from) && to.is_cpu()) {
    if (!non_blocking || !is_pinned(to.data_ptr())) waits("copy to the host");
  } else if (from.is_cpu() && is_pretend(to)) {
    if (!non_blocking) waits("copy from the host");
    else if (!is_pinned(from.data_ptr())) waits("copy from pageable memory of the host");
  }
  auto target = is_pretend(to) ? on_cpu(to) : to;
  target.copy_(is_pretend(from) ? on_cpu(from) : from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor& set_storage(
    Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

// Its CPU kernel would draw from the processor's stream.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train)
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// Attention in one kernel that keeps no matrix of scores, where a card has one.
int64_t attention_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double dropout, bool, std::optional<double>, bool) {
  const bool fused = query.dim() == 4 && dropout == 0 && query.size(3) == value.size(3) &&
      query.size(1) == key.size(1) && !(mask.has_value() && mask->requires_grad());
  return static_cast<int64_t>(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::optional<Tensor> of_host(const std::optional<Tensor>& mask, const Tensor& query) {
  if (!mask.has_value() || !mask->defined()) return std::nullopt;
  auto given = on_cpu(*mask);
  if (given.scalar_type() != at::kBool) return given;
  auto added = at::zeros(given.sizes(), at::TensorOptions().dtype(query.scalar_type()));
  return added.masked_fill_(given.logical_not(), -std::numeric_limits<double>::infinity());
}

Tensor taken(const Tensor& made, Device device) {
  std::vector<Shared> none;
  return on_pretend(made, none, device);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    double dropout, bool causal, bool, std::optional<double> scale) {
  operations++;
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      on_cpu(query), on_cpu(key), on_cpu(value), dropout, causal, of_host(mask, query), scale);
  const auto device = query.device();
  return {taken(out, device), taken(sums, device), {}, {}, query.size(2), key.size(2), {}, {}, {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& slope, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&,
    const Tensor&, std::optional<double> scale) {
  operations++;
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      on_cpu(slope), on_cpu(query), on_cpu(key), on_cpu(value), on_cpu(out), on_cpu(sums), dropout,
      causal, of_host(mask, query), scale);
  const auto device = query.device();
  return {taken(q, device), taken(k, device), taken(v, device), {}};
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_choice)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("native_dropout", &dropout);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WITH_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_LOW_PRECISION)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(WITH_DTYPE)
  AT_FORALL_PROMOTE(IN_WIDEST)
}
}  // namespace at::autocast

TORCH_LIBRARY(pretend, m) {
  m.def("waited(str what) -> ()");
  m.def("watch(bool on) -> ()", [](bool on) { watched = on; });
  m.def("host(Tensor(a) tensor) -> Tensor(a)", [](const Tensor& tensor) {
    return is_pretend(tensor) ? on_cpu(tensor) : tensor;
  });
  m.def("devices() -> int", []() -> int64_t { return COUNT; });
  m.def("allocated(int device) -> int", [](int64_t device) -> int64_t { return bytes_now[device]; });
  m.def("peak(int device) -> int", [](int64_t device) -> int64_t { return bytes_peak[device]; });
  m.def("forget_peak(int device) -> ()", [](int64_t device) {
    bytes_peak[device] = bytes_now[device].load();
  });
  m.def("operations() -> int", []() -> int64_t { return operations; });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    static_cast<PretendGenerator*>(default_generator().unsafeGetGeneratorImpl())
        ->set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("rng_state() -> Tensor", [] {
    return Tensor(default_generator().unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) {
    default_generator().unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
}
