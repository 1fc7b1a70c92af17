// A fake accelerator: torch's PrivateUse1 backend in host memory. tests/fake_device/__init__.py tells what it does.
//
// An operation is a launch: it is handed to the current stream of its device, and a worker thread of that stream
// computes it with the kernel of the CPU, no earlier than a delay after the launch. What the result looks like comes
// from torch's meta kernels. Where the host needs a value (a scalar, a blocking copy, a shape that depends on values)
// it waits for the stream first, as it would for a GPU. Without a delay, everything is computed at once.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;
using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr c10::StreamId kStreams = 9;  // of each device: the default one, and those that are handed out in turns
constexpr int kPoison = 0xFF;  // NaN, whatever the floating point type

std::atomic<int> delay_ms{0};
std::mutex hold_mutex;
std::condition_variable hold_ended;
std::atomic<bool> held{false};

bool is_late() { return delay_ms > 0 || held; }

std::atomic<int64_t> copies_to_host{0}, copies_to_device{0}, scalar_reads{0}, late_copies{0}, live_bytes{0}, peak_bytes{0};

// --- streams and events --------------------------------------------------------------------------------------------

std::mutex error_mutex;
std::optional<std::string> late_error;  // of work that nobody waited for when it failed

void remember_error(const std::string& text) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (!late_error) late_error = text;
}

void raise_late_error() {
  std::optional<std::string> text;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    text.swap(late_error);
  }
  TORCH_CHECK(!text, "an operation that was launched earlier on the fake device has failed: ", *text);
}

void run_below_autograd(const Work& work) {
  at::AutoDispatchBelowADInplaceOrView guard;
  work();
}

// Work in the order of its launches; the thread begins with the first that is late.
class Queue {
 public:
  void push(Work work, std::chrono::milliseconds delay) { push(std::move(work), delay, [] {}); }

  // Calls something, briefly, when all that has been pushed so far is done, and the queue counts it as done.
  void push_mark(Work reached) { push([] {}, std::chrono::milliseconds(0), std::move(reached)); }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == pushed_;
  }

  // Waits for all that has been pushed so far.
  void drain() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const int64_t target = pushed_;
      TORCH_CHECK(!held || done_ >= target, "the host waits for work that is held back");
      changed_.wait(lock, [&] { return done_ >= target; });
    }
    raise_late_error();
  }

 private:
  struct Item {
    Work work;
    Clock::time_point not_before;
    Work when_counted;
  };

  void push(Work work, std::chrono::milliseconds delay, Work when_counted) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();  // queues live as long as the process
    }
    ++pushed_;
    items_.push_back({std::move(work), Clock::now() + delay, std::move(when_counted)});
    changed_.notify_all();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !items_.empty(); });
      Item item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(item.not_before);
      {
        std::unique_lock<std::mutex> hold_lock(hold_mutex);
        hold_ended.wait(hold_lock, [] { return !held; });
      }
      try {
        run_below_autograd(item.work);
      } catch (const std::exception& error) {
        remember_error(error.what());
      }
      item.work = nullptr;  // what it held is free before anybody hears that it is done
      lock.lock();
      ++done_;
      item.when_counted();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  int64_t pushed_ = 0, done_ = 0;
  bool started_ = false;
};

Queue& queue_of(DeviceIndex device, c10::StreamId stream) {
  static auto* queues = new Queue[kDevices * kStreams];  // never freed: their threads outlive static objects
  return queues[device * kStreams + stream];
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

DeviceIndex index_of(const c10::Device& device) { return device.has_index() ? device.index() : current_device; }

void check_index(DeviceIndex index) {
  TORCH_CHECK(0 <= index && index < kDevices, "there is no device fake:", int(index), ", only ", int(kDevices), " of them");
}

c10::Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), id);
}

Queue& current_queue(DeviceIndex device) { return queue_of(device, current_stream[device]); }

void launch(DeviceIndex device, bool may_be_late, const Work& work) {
  Queue& queue = current_queue(device);
  if (may_be_late && is_late()) {
    queue.push(work, std::chrono::milliseconds(delay_ms));
  } else {
    queue.drain();
    run_below_autograd(work);
  }
}

void wait_for_all() {
  for (DeviceIndex device = 0; device < kDevices; ++device)
    for (c10::StreamId stream = 0; stream < kStreams; ++stream) queue_of(device, stream).drain();
}

// One recording of an event. Events are recorded again and again; who waits means the recording at that time.
struct Recording {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point when;

  void finish() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    when = Clock::now();
    changed.notify_all();
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Recording> last;

  std::shared_ptr<Recording> latest() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }
};

std::shared_ptr<Recording> latest_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->latest();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kFake, current_device); }
  void setDevice(c10::Device device) const override {
    check_index(index_of(device));
    current_device = index_of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> made{0};
    return stream_of(index_of(device), 1 + made++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream.device_index(), stream.id()).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream.device_index(), stream.id()).drain();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    for (c10::StreamId stream = 0; stream < kStreams; ++stream) queue_of(device, stream).drain();
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    auto recording = std::make_shared<Recording>();
    {
      auto* own = static_cast<Event*>(*event);
      std::lock_guard<std::mutex> lock(own->mutex);
      own->last = recording;
    }
    Queue& queue = queue_of(stream.device_index(), stream.id());
    if (queue.idle()) {
      recording->finish();
    } else {
      queue.push_mark([recording] { recording->finish(); });
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto recording = latest_of(event);
    if (recording && !recording->is_done())
      queue_of(stream.device_index(), stream.id()).push([recording] { recording->wait(); }, std::chrono::milliseconds(0));
  }
  bool queryEvent(void* event) const override {
    auto recording = latest_of(event);
    return !recording || recording->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (auto recording = latest_of(event)) recording->wait();
    raise_late_error();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto from = latest_of(first), to = latest_of(second);
    TORCH_CHECK(from && to && from->is_done() && to->is_done(), "both events must be recorded and completed");
    return std::chrono::duration<double, std::milli>(to->when - from->when).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory ----------------------------------------------------------------------------------------------------------

void* poisoned(size_t nbytes) {
  void* memory = std::malloc(nbytes ? nbytes : 1);
  TORCH_CHECK(memory != nullptr, "no memory for ", nbytes, " bytes");
  std::memset(memory, kPoison, nbytes);
  return memory;
}

struct DeviceAllocator final : c10::Allocator {
  struct Block {
    void* memory;
    int64_t nbytes;
  };
  c10::DataPtr allocate(size_t nbytes) override {
    auto* block = new Block{poisoned(nbytes), int64_t(nbytes)};
    const int64_t live = live_bytes += block->nbytes;
    int64_t peak = peak_bytes;
    while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
    }
    return {block->memory, block, &free_block, c10::Device(kFake, current_device)};
  }
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes -= block->nbytes;
    std::free(block->memory);
    delete block;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
} device_allocator;

REGISTER_ALLOCATOR(kFake, &device_allocator)

std::mutex pinned_mutex;
auto& pinned_blocks = *new std::unordered_set<const void*>();  // never freed: pinned tensors may outlive static objects

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = poisoned(nbytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_blocks.insert(memory);
    return {memory, memory, &free_block, c10::Device(at::kCPU)};
  }
  static void free_block(void* memory) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks.erase(memory);
    }
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
} pinned_allocator;

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned_blocks.count(memory) > 0;
}

bool is_pinned(const Tensor& tensor) { return is_pinned(tensor.storage().data()); }

void grow(const c10::Storage& storage, size_t nbytes) {
  const c10::Device device = storage.device();
  c10::DeviceGuard guard(device);
  c10::DataPtr larger = device_allocator.allocate(nbytes);
  current_queue(index_of(device)).drain();
  std::memcpy(larger.get(), storage.data(), std::min(nbytes, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(larger));
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override {
    check_index(index);
    current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = current_device;
    setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  // Random numbers come from the generators of the CPU: equal seeds give equal numbers on both.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { grow(storage, nbytes); }
};

// --- operations ------------------------------------------------------------------------------------------------------

bool is_fake(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

// The same memory as a tensor of the CPU. It keeps the memory, but not the tensor, whose end may need Python.
Tensor over_host(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([storage = tensor.storage()](void*) {})
      .options(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
      .make_tensor();
}

Tensor with_values_of_now(const Tensor& scalar) {
  Tensor copy = scalar.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(scalar.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

Tensor over_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

using Change = std::function<Tensor(const Tensor&)>;

IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

Stack changed(const Stack& values, const Change& change) {
  Stack result;
  for (const IValue& value : values) result.push_back(changed(value, change));
  return result;
}

void for_each_tensor(const Stack& values, const std::function<void(const Tensor&)>& visit) {
  for (const IValue& value : values)
    changed(value, [&](const Tensor& tensor) {
      visit(tensor);
      return tensor;
    });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// An argument out=, for which kernels get a tensor without values: some of them first give it another shape than its last.
bool is_out(const c10::Argument& argument, const IValue& value) {
  return is_written(argument) && argument.kwarg_only() && value.isTensor() && value.toTensor().defined();
}

Stack with_empty_outs(const c10::FunctionSchema& schema, Stack arguments) {
  for (size_t i = 0; i < arguments.size(); ++i)
    if (is_out(schema.arguments()[i], arguments[i]))
      arguments[i] = at::empty({0}, arguments[i].toTensor().options());
  return arguments;
}

// Which argument a result is, if an operation returns what it has changed.
std::optional<size_t> returned_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return std::nullopt;
  TORCH_CHECK(result.alias_info()->isWrite(), "the fake device has no kernel for the view ", schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *result.alias_info()) return i;
  }
  TORCH_CHECK(false, "none of the arguments of ", schema.name(), " is its result");
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return false;
  }
  return true;
}

// Random numbers are drawn at once, or their order would depend on how fast streams are.
bool draws_random_numbers(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments())
    if (argument.type()->str().find("Generator") != std::string::npos) return true;
  return false;
}

// A host tensor with many values would be read late, but a GPU's kernels read it at the launch.
bool reads_host_memory(const Stack& arguments) {
  bool found = false;
  for_each_tensor(arguments, [&](const Tensor& tensor) { found |= tensor.is_cpu() && tensor.dim() > 0; });
  return found;
}

// What an operation will return, without its values; nothing if that depends on values, or arguments would be resized.
std::optional<Stack> foreseen(const c10::OperatorHandle& op, const Stack& arguments) {
  const Stack before = with_empty_outs(
      op.schema(), changed(arguments, [](const Tensor& tensor) { return is_fake(tensor) ? over_meta(tensor) : tensor; }));
  Stack results = before;
  try {
    op.callBoxed(&results);
  } catch (const std::exception&) {
    return std::nullopt;  // either there is no such kernel, or the arguments are wrong, which the CPU tells better
  }
  for (size_t i = 0; i < arguments.size(); ++i)
    if (is_out(op.schema().arguments()[i], before[i]) &&
        arguments[i].toTensor().sizes() != before[i].toTensor().sizes())
      return std::nullopt;
  return results;
}

Tensor like_on_device(const Tensor& tensor, DeviceIndex device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(kFake, device)));
}

void copy_all(const Stack& targets, const Stack& sources) {
  std::vector<Tensor> from, to;
  for_each_tensor(sources, [&](const Tensor& tensor) { from.push_back(tensor); });
  for_each_tensor(targets, [&](const Tensor& tensor) { to.push_back(tensor); });
  TORCH_CHECK(from.size() == to.size(), "an operation returned other tensors than it was expected to");
  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
}

bool launch_late(const c10::OperatorHandle& op, const Stack& arguments, DeviceIndex device, Stack& results) {
  const auto& schema = op.schema();
  if (!returns_only_tensors(schema) || draws_random_numbers(schema) || reads_host_memory(arguments)) return false;
  std::optional<Stack> shapes = foreseen(op, arguments);
  if (!shapes) return false;
  const Stack given = changed(arguments, [](const Tensor& tensor) {
    return is_fake(tensor) ? over_host(tensor) : with_values_of_now(tensor);
  });
  const Stack host = with_empty_outs(schema, given);
  std::vector<bool> is_new;
  Stack targets;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto argument = returned_argument(schema, schema.returns()[i]);
    is_new.push_back(!argument);
    results.push_back(argument ? arguments[*argument] : changed((*shapes)[i], [&](const Tensor& tensor) {
      return like_on_device(tensor, device);
    }));
    if (!argument) targets.push_back(changed(results.back(), over_host));
  }
  launch(device, true, [op, given, host, targets, is_new] {
    Stack stack = host, made;
    op.callBoxed(&stack);
    for (size_t i = 0; i < stack.size(); ++i)
      if (is_new[i]) made.push_back(stack[i]);
    copy_all(targets, made);
    for (size_t i = 0; i < host.size(); ++i)
      if (is_out(op.schema().arguments()[i], host[i])) given[i].toTensor().copy_(host[i].toTensor());
  });
  return true;
}

void run_at_once(const c10::OperatorHandle& op, const Stack& arguments, DeviceIndex device, Stack& results) {
  const auto& schema = op.schema();
  const Stack host = with_empty_outs(
      schema, changed(arguments, [](const Tensor& tensor) { return is_fake(tensor) ? over_host(tensor) : tensor; }));
  Stack stack = host;
  launch(device, false, [&] { op.callBoxed(&stack); });
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_out(schema.arguments()[i], arguments[i])) continue;
    const Tensor &own = arguments[i].toTensor(), &made = host[i].toTensor();
    if (own.sizes() != made.sizes()) own.resize_(made.sizes());
    over_host(own).copy_(made);
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto argument = returned_argument(schema, schema.returns()[i]);
    if (!stack[i].isTensor() && !stack[i].isTensorList()) ++scalar_reads;
    results.push_back(argument ? arguments[*argument] : changed(stack[i], [&](const Tensor& tensor) {
      Tensor result = like_on_device(tensor, device);
      over_host(result).copy_(tensor);
      return result;
    }));
  }
}

// Any operation that has no kernel below.
void compute(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Stack arguments(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  std::optional<DeviceIndex> device;
  for_each_tensor(arguments, [&](const Tensor& tensor) {
    if (!is_fake(tensor)) return;
    TORCH_CHECK(!device || tensor.dim() == 0 || *device == tensor.device().index(), op.schema().name(),
                ": Expected all tensors to be on the same device, but found two fake devices");
    if (!device) device = tensor.device().index();
  });
  TORCH_CHECK(device, "the fake device cannot compute ", op.schema().name());
  for_each_tensor(arguments, [&](const Tensor& tensor) {
    TORCH_CHECK(is_fake(tensor) || tensor.dim() == 0 || op.schema().name().find("index") != std::string::npos,
                op.schema().name(), ": Expected all tensors to be on the same device, but found fake and ",
                tensor.device());
  });
  Stack results;
  if (!is_late() || !launch_late(op, arguments, *device, results)) {
    results.clear();
    run_at_once(op, arguments, *device, results);
  }
  for (IValue& result : results) stack->push_back(std::move(result));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool to_host = target.is_cpu(), from_host = source.is_cpu();
  const Tensor from = over_host(source), to = over_host(target);
  const Work work = [from, to] { to.copy_(from); };
  if (to_host) {
    const bool late = non_blocking && is_pinned(target);
    ++copies_to_host;
    late_copies += late && is_late();
    launch(source.device().index(), late, work);
  } else if (from_host) {
    ++copies_to_device;
    launch(target.device().index(), non_blocking && is_pinned(source), work);
  } else {
    const bool same = source.device() == target.device();
    if (!same) current_queue(source.device().index()).drain();
    launch(target.device().index(), same, work);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar read_scalar(const Tensor& tensor) {
  ++scalar_reads;
  c10::Scalar value;
  launch(tensor.device().index(), false, [&] { value = over_host(tensor).item(); });
  return value;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + impl->numel()) * self.element_size();
  if (needed > impl->storage().nbytes()) grow(impl->storage(), needed);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t count = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
}

pybind11::dict counts() {
  pybind11::dict result;
  result["d2h"] = copies_to_host.load();
  result["h2d"] = copies_to_device.load();
  result["scalars"] = scalar_reads.load();
  result["late"] = late_copies.load();
  result["live"] = live_bytes.load();
  result["peak"] = peak_bytes.load();
  return result;
}

void reset() {
  copies_to_host = copies_to_device = scalar_reads = late_copies = 0;
  peak_bytes = live_bytes.load();
}

void hold(bool back) {
  std::lock_guard<std::mutex> lock(hold_mutex);
  held = back;
  hold_ended.notify_all();
}

void occupy(int milliseconds) {
  current_queue(current_device).push(
      [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); },
      std::chrono::milliseconds(0));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using release_gil = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("install", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  module.def("delay", [](int milliseconds) { delay_ms = milliseconds; });
  module.def("hold", &hold);
  module.def("wait", &wait_for_all, release_gil());
  module.def("occupy", &occupy);
  module.def("counts", &counts);
  module.def("reset", &reset);
}
