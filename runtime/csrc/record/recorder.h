// Records op calls, and puts cut regions on the launch queue.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>

#include <array>
#include <map>
#include <unordered_map>

#include "bind/bridge.h"
#include "device/device.h"
#include "device/storage.h"
#include "record/runtime.h"
#include "record/trie.h"

namespace torchtpu {

struct Work;
using WorkRef = std::shared_ptr<Work>;

// What happened on the host while ops were recorded, in their order.
struct HostChanges {
  std::vector<Draw> draws;
  std::vector<std::shared_ptr<PyObject>> steps;  // of optimizers, each as what undoes it

  // Adds `later`, of which the first draws stay.
  void add(HostChanges later, size_t kept_draws = 0);
};

// What a recorder records between two errors that its threads are told of.  Once a region of it has failed, no later
// one is launched: eager PyTorch would have raised by then.
struct Transaction {
  std::atomic<PyObject*> error{nullptr};  // of its first region that failed
  std::weak_ptr<Work> last;               // its last region; under state_lock
  HostChanges undone;                     // of its regions that failed; under state_lock
  ~Transaction();
};

// The pending region of one thread family on one device.  All fields but `device` are guarded by state_lock.
struct Recorder {
  explicit Recorder(c10::DeviceIndex device);
  const c10::DeviceIndex device;
  bool is_open =
      false;  // an op may be recorded at once: no boundary or speculative tail is left to take, and `entry` is noted
  uint64_t epoch;  // names the pending region; never reused
  std::shared_ptr<Trie> trie = std::make_shared<Trie>();
  Node* at;                       // the last op recorded
  Node* shadow = nullptr;         // after a fork over a number: where the old path stands
  std::vector<BufferRef> inputs;  // value ~i is inputs[i]
  std::vector<double> floats;     // lifted numbers so far
  std::vector<int64_t> ints;
  std::vector<TpuStorage*> live;   // value -> the storage it is the present value of, or null
  HostChanges changes;             // while the region was recorded
  const char* boundary = nullptr;  // a marked end of the region, taken at the next op
  std::string boundary_line;
  std::shared_ptr<CodePlace> entry;        // where the first op of the region was called
  std::map<int32_t, BufferRef> subgraphs;  // values of the region that were read beside it
  Node* speculative_tail = nullptr;        // the ops after this node were recorded for a read
  int64_t recorded = 0;                    // ops of the regions before this one
  std::shared_ptr<Transaction> transaction = std::make_shared<Transaction>();
  bool is_empty() const { return at == &trie->root; }
};

uint64_t new_epoch();

// The value number of a storage's present value in r's region; assigns an input where it needs one.
int32_t value_of_slow(Recorder& r, TpuStorage* s);
inline int32_t value_of(Recorder& r, TpuStorage* s) { return s->epoch == r.epoch ? s->value : value_of_slow(r, s); }
// The same for a buffer; `is_shared` where other recorders may read it too.
int32_t input_value(Recorder& r, const BufferRef& buffer, bool is_shared);
// Forgets the inputs above `count`, which belong to calls that came to nothing.
void drop_inputs(Recorder& r, size_t count);
// The storage's present value is about to be replaced or dropped.  Under state_lock.
void forget_value(TpuStorage* s);
// Moves the present value of `from` to `to`, which takes its base too.
void move_value(TpuStorage* from, TpuStorage* to);

// Before anything that needs the device, no lock held.  A forked child has none: raises there what CUDA raises.  While
// the interpreter ends, any thread but the one that ends it stops here for good.
void refuse_or_sleep();
inline void check_running() {
  if (C10_UNLIKELY(runtime.process != Process::kRuns)) refuse_or_sleep();
}
bool has_recorded();  // whether the calling thread is one of them
// In an autograd thread: Python's state of the thread that it works for, which waits for it; null in any other.  The
// GIL is held.
struct _ts* callers_state();
// The recorder of the calling thread's family (autograd's threads belong to their caller's).
Recorder& recorder_for(c10::DeviceIndex device);
std::vector<Recorder*> all_recorders();

// A value that outlives its region though no storage may hold it.
struct KeptValue {
  int32_t value;
  BufferRef buffer;  // set by the cut
};
// Ends the pending region and queues it; null where nothing was recorded.  `kept` ascends.  Under state_lock.
WorkRef cut_locked(Recorder& r, const char* reason, std::string line, std::vector<KeptValue>* kept = nullptr);
// The same for the calling thread's recorder: takes the lock, wakes the launcher, waits while too much is in flight.
WorkRef cut(Recorder& r, const char* reason);
// Drops the pending region of a recorder whose transaction has failed, and ends that: what it would have made fails
// with the error.  Under state_lock, with the GIL.
void drop_region(Recorder& r, PyObject* error);
// Ends the pending region, which has reached a limit, where its ops look most like a place to cut.
void cut_at_cap(Recorder& r, const char* reason);
// Where a long op stream comes again with other shapes, and again: ends regions around the ops that stay the same,
// whose programs then serve every shape.  Under state_lock.
void split_by_shape(Recorder& r, const std::string& line);
// Notes that the pending region's ops come in these sizes; where they came in others last, if that goes on changing.
const Node* note_sizes(Recorder& r);
// A plan of the pending region's ops in other sizes, where these keep changing and could be given room.
std::shared_ptr<Plan> find_smaller(const Recorder& r);
// Where the region has no program and none may be made: ends regions where earlier ones ended, as far as their programs
// serve.  Under state_lock.
void split_by_known(Recorder& r, const std::string& line);
// Marks the end of what an optimizer's step records; `undo` takes back what the step did on the host.
void mark_boundary(const char* reason, const std::shared_ptr<PyObject>& undo);
// How many random numbers were drawn by the ops up to this one.
size_t count_draws(const Node* end);
// Ends every pending region and forgets all op streams and their plans.
void forget_streams();

// Makes the storage's present value a buffer (cutting where it is pending) and returns it, counted as being read; null
// where undefined.
BufferRef materialize(TpuStorage* s, const char* reason);
// The same for a value that is read once, which need not end the region: see subgraph.cpp.
struct ReadValue {
  BufferRef buffer;
  bool is_subgraph = false;
};
ReadValue materialize_to_read(TpuStorage* s);
// A host tensor with t's sizes, strides and values; waits for them.
at::Tensor read_to_host(const at::Tensor& t);
// Waits for everything queued on `device` (-1: on all) and raises the first failure nobody has seen.
void synchronize(c10::DeviceIndex device);
// A point in the device's order: everything recorded before it has finished when it is reached.
int64_t record_marker(c10::DeviceIndex device);
void wait_marker(int64_t marker);
double marker_time(int64_t marker);  // seconds of the steady clock; negative while not reached
void resize_storage(c10::StorageImpl& storage, size_t nbytes);

bool is_exact();  // by policy, or by torch.use_deterministic_algorithms
// A call's results, with None where a result is one of its arguments.  They are collected beside the stack: a dying
// argument takes state_lock, so the arguments outlive it.
using Results = c10::SmallVector<IValue, 4>;

struct RecordKernel {
  RecordKernel(const c10::OperatorHandle& handle, const OpFacts& facts) : info(handle, facts) {}
  // Any call: takes its arguments from the stack and leaves its results there.
  void call(Stack* stack) const;
  // A call that follows a known op stream; false, and nothing done, where it does not.
  bool hit(const IValue* args, Results& results, bool is_retry = false) const;
  const OpInfo info;
};
// Registers the recorder for each op and for its in-place and out= variants; returns variant -> functional name.
std::unordered_map<std::string, std::string> register_ops(const std::vector<std::pair<std::string, OpFacts>>& table);
// The same for one op outside ATen, by its name: "mylib::scale".  Its kernel stays for the life of the process.
void register_op(const std::string& name, const OpFacts& facts);
// Records dst.copy_(src), both on one tpu.
void record_copy(const at::Tensor& dst, const at::Tensor& src);

// Changes the arguments that the hit path does not know: foreign storages, storages without a shape, CPU index tensors,
// lazily conjugated or negated tensors.  True where it changed something, so that the call may match now.
bool prepare_args(const OpInfo& info, c10::DeviceIndex device, Stack* stack);
// Serves a call that cannot be one node: a write into a lazy tensor, a list whose writes overlap.  False: it can be
// one.
bool run_in_parts(const RecordKernel& kernel, Stack* stack);
// Before a recorded write grows the storage of a view that does not begin it, its other bytes move to a larger one.
void grow_outputs(const OpInfo& info, const IValue* args, const Stack& after);
// A flat tensor over all of a storage's bytes; its dtype is the base's where that fits.
at::Tensor flat_view(TpuStorage& s);

// Runs an op on the CPU: counted, attributed, and refused where the user asked for that.
void run_on_cpu(const c10::OperatorHandle& op, Stack* stack);
// A call that has a lowering but cannot be recorded: the form composed of other ops, where there is one, or the CPU.
void run_unrecorded(const c10::OperatorHandle& op, Stack* stack);

}  // namespace torchtpu
