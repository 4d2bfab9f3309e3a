// The launch queue: hands cut regions to the engine in program order, and lets readers wait.
#pragma once

#include <ATen/EmptyTensor.h>

#include <condition_variable>
#include <deque>
#include <optional>

#include "record/recorder.h"

namespace torchtpu {

// One program: a path of the trie with its live set and donation mask.
struct Plan {
  enum State : uint8_t { kNew, kReady, kFailed };
  explicit Plan(const Recorder& r) : node(r.trie, r.at), device(r.device), entry(r.entry) {}
  const HeldNode node;  // where the path ends
  std::vector<BaseRef> inputs;
  std::vector<int32_t> outputs;  // values, ascending
  std::vector<BaseRef> output_bases;
  std::vector<Maker> output_makers;
  std::vector<uint8_t> donated;  // by input
  int64_t output_bytes = 0;
  const c10::DeviceIndex device;
  std::shared_ptr<Plan> before;            // until it is planned: one of the same ops, whose sizes it may have outgrown
  std::string line;                        // where its first region ended
  int64_t regions = 0;                     // that had ended there by then
  std::string nearest;                     // under policy frozen: the known region that has most in common
  const std::shared_ptr<CodePlace> entry;  // where that began
  std::atomic<State> state{kNew};
  std::atomic<bool> is_planned{false};  // the engine has seen it: one that is not ready then involves no other rank
  std::atomic<bool> is_quick{false};    // its last launch took so little time that a reading thread may do the next
  bool has_effects = false;             // an op of it does more than make its results: other ranks take part in it
  bool is_pure = false;                 // a launch makes new values, and has no other effect
  PyObject* executable = nullptr;       // written before state becomes kReady
  PyObject* error = nullptr;            // written before state becomes kFailed
  // What its next launch may do without the engine, and who holds it; null where the engine has to be asked.  These and
  // the number of launches that the engine made are read and written with the GIL held.
  struct DirectLaunch* direct = nullptr;
  PyObject* direct_holder = nullptr;
  int64_t engine_launches = 0;
  ~Plan();
};

// For values that are newer versions of a storage: the version before, which may be an input.
using Versions = std::unordered_map<int32_t, int32_t>;
Versions versions_of(const Node* end);
// The oldest version of a value: an input, or what an op of the region made.
int32_t oldest(const Versions& versions, int32_t value);
// What a storage that holds this buffer now is given back where a later version fails.
BufferRef restored_by(const BufferRef& buffer);

// Whether a work that a thread waits for was launched before works that were cut earlier.
enum class Ahead : uint8_t {
  kNo,
  kTrying,   // while it is: should it fail, nothing has happened
  kDone,     // its values are there, and its turn is still to come
  kGivenUp,  // it may not be, or it failed
};

// One launch of a plan, or a marker (no plan) that stamps the time when everything before it has finished.
struct Work {
  uint64_t sequence = 0;
  std::shared_ptr<Plan> plan;
  std::vector<BufferRef> inputs;
  std::vector<BufferRef> outputs;  // null where the plan computes more than is alive
  at::Tensor floats, ints;
  c10::DeviceIndex device = 0;
  std::string reason, line;
  std::shared_ptr<CodePlace> entry;
  std::shared_ptr<Transaction> transaction;  // null where it is a marker
  HostChanges changes;                       // while its ops were recorded
  size_t first_undone = SIZE_MAX;            // of the draws, where an op before them has failed
  std::vector<BufferRef> restored;   // by output, where that fails and its storage held a value made in the region
  std::optional<Versions> versions;  // once an output has failed
  bool is_subgraph = false;          // computes again, for a read, what its region will compute
  Ahead ahead = Ahead::kNo;          // changed by who holds queue->order
  std::atomic<bool> is_done{false};
  double cut_at = 0, finished_at = 0;  // seconds of the steady clock; finished_at is a marker's
};

// A plan for the program that ends at r.at, handed to the engine.
std::shared_ptr<Plan> make_plan(const Recorder& r, std::vector<BaseRef> inputs, std::vector<int32_t> outputs,
                                std::vector<uint8_t> donated, const std::string& line,
                                std::shared_ptr<Plan> before = nullptr);
template <class T>
at::Tensor pack(const std::vector<T>& numbers) {
  if (numbers.empty()) return {};
  auto t = at::detail::empty_cpu({static_cast<int64_t>(numbers.size())}, c10::CppTypeToScalarType<T>::value);
  memcpy(t.data_ptr(), numbers.data(), numbers.size() * sizeof(T));
  return t;
}
// Under state_lock: what comes reaches the queue with the next wake_launcher or wait, in any thread.
void enqueue_plan(std::shared_ptr<Plan> plan);
void enqueue(WorkRef work);
extern std::atomic<bool> has_arrivals;  // something has come that has not reached the queue
void wake_launcher();                   // soon
void hurry_launcher();                  // at once
double seconds_now();                   // of the steady clock, which is Python's time.perf_counter()
// As `cut`, for a thread that waits for the work next and launches it itself where that is quick: nobody is woken.
WorkRef cut_to_wait(Recorder& r, const char* reason);
// Waits, GIL released, until at most limits.max_in_flight regions are queued or a signal comes.  Raises nothing.
void throttle();
// Waits until the buffer is ready; launches in this thread where that saves a hand-off.  Raises its error.
void wait_ready(const BufferRef& buffer);
// The same for everything queued so far.
void wait_all();
void wait_done(const WorkRef& work);
int64_t queue_length();
extern std::atomic<int64_t> num_launched_ahead;

// What the engine answers; the GIL is held.
void plan_ready(Plan& plan, PyObject* executable);
void plan_failed(Plan& plan, PyObject* error);
// `guards`: per output, or empty; null where an output depends on no open check.
void work_done(Work& work, const std::vector<PyObject*>& objects, const std::vector<PyObject*>& guards);
void work_spoil(Work& work, size_t output, PyObject* error);  // one output fails, the others are still to come
// One output is there though others are to fail.
void work_keep(Work& work, size_t output, PyObject* object, PyObject* guard);
// An output is to fail whose storage held this array right before the op that failed.
void work_restore(Work& work, size_t output, BaseRef base, PyObject* object, PyObject* guard);
// The region is to fail before an op that drew from here.
void work_take_back(Work& work, uint64_t seed, uint64_t offset);
// What is left of the outputs fails, and with it the transaction.
void work_failed(Work& work, PyObject* error);
// The turn of a work has come whose values are there: where an earlier one has failed since, what Python did while its
// ops were recorded is taken back.
void work_passed(Work& work);
// Raises, once, the first failure that no read has raised.
void raise_unseen_error();
// Raises an error that a value failed with.  Storages get back what they held before the op that failed; so do those
// that the calling thread's ops have written since, for eager PyTorch would not have run these.
[[noreturn]] void raise_failure(PyObject* error);

// How this run differs from the one whose source lines the plan's nodes keep: "entered from file:line"; "" where it
// does not.
std::string describe_run(const Plan& plan, const CodePlace* entry, const std::string& line);

// Threads that copy a value to the host now.
extern std::atomic<int> num_reading;

void set_engine(PyObject* engine);
// Ends the launcher and the planner; whether they have ended within so many seconds.  The GIL is held.
bool shutdown(double seconds);

}  // namespace torchtpu
