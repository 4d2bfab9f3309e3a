#include "launch/queue.h"

#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <unordered_set>

#include "bind/bridge.h"
#include "device/gil.h"
#include "launch/collection.h"
#include "launch/direct.h"
#include "launch/handover.h"
#include "launch/signals.h"

namespace torchtpu {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

// Everything here lives until the process ends: storages die after static destructors have run.
struct Queue {
  std::mutex mutex;                   // guards the fields below
  std::condition_variable to_launch;  // for the launcher
  std::condition_variable to_plan;    // for the planner
  std::condition_variable changed;    // for threads that wait: something was planned, launched or stopped
  std::deque<WorkRef> works;          // in launch order
  std::deque<std::shared_ptr<Plan>> plans;
  bool is_idle = false;                // the launcher waits for work
  bool is_urgent = false;              // a thread waits for what the launcher does
  std::vector<const Buffer*> awaited;  // by threads that wait for them alone
  bool may_overtake = false;           // works behind the front may have become launchable, of which one is awaited
  uint64_t next_sequence = 0, next_done = 0;
  bool is_stopping = false;
  std::thread::id stopper;  // the thread that stops
  bool has_started = false;
  int num_running = 0;  // of launcher and planner
  std::vector<std::thread> handles;

  // Held while the front of `works` is launched: launches happen in one order, in whichever thread is there first.
  // Never waited for with the GIL or `mutex` held.
  std::mutex order;
};
Queue* queue = new Queue();

// What has been cut and planned since the queue looked last; under state_lock.
struct Arrivals {
  std::vector<WorkRef> works;  // in the order of their cuts
  std::vector<std::shared_ptr<Plan>> plans;
};
Arrivals* arrivals = new Arrivals();

// Holds queue->mutex; what has arrived is in the queue.
class QueueLock {
 public:
  QueueLock() {
    assert_no_spin_lock();
    lock_.lock();
    if (!has_arrivals.load(std::memory_order_relaxed)) return;
    Arrivals arrived;
    {
      StateGuard guard(state_lock);
      std::swap(arrived, *arrivals);
      has_arrivals.store(false, std::memory_order_relaxed);
    }
    for (auto& work : arrived.works) {
      work->sequence = queue->next_sequence++;
      queue->works.push_back(std::move(work));
    }
    if (arrived.plans.empty()) return;
    std::move(arrived.plans.begin(), arrived.plans.end(), std::back_inserter(queue->plans));
    queue->to_plan.notify_one();
  }
  operator std::unique_lock<std::mutex>&() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_{queue->mutex, std::defer_lock};
};

std::atomic<int> num_asleep{0};

// How long a cut region waits for company before it is launched; one that somebody waits for does not.  Each time that
// the launcher takes the GIL costs the recording thread what some twenty ops cost.
constexpr auto kLaunchDelay = std::chrono::milliseconds(1);
// A launch may run the program, and signal handlers wait for one in the main thread.
constexpr double kQuickSeconds = 0.01;
constexpr auto kLookEvery = std::chrono::milliseconds(100);
constexpr double kReportEverySeconds = 1;

enum class OnSignal { kRaise, kReturn };

// What a long wait says of itself, each second, until it ends.
class WaitReports {
 public:
  ~WaitReports() {
    if (next_ > kReportEverySeconds) report_waited();
  }
  // The GIL is held.
  template <class Describe>
  void report(double waited, Describe&& describe) {
    if (waited < next_) return;
    next_ = waited + kReportEverySeconds;
    report_waiting(describe(), waited);
  }

 private:
  double next_ = kReportEverySeconds;
};

// Waits for `ready` under queue->mutex, GIL released, or for a signal, whose handler may raise; a long wait reports
// what `describe` says.
template <class Ready, class Describe>
void wait_until(Ready&& ready, Describe&& describe, OnSignal on_signal = OnSignal::kRaise) {
  auto start = Clock::now();
  WaitReports reports;
  for (;;) {
    auto step = [&] {
      QueueLock lock;
      return queue->changed.wait_for(lock, kLookEvery, ready);
    };
    bool has_gil = Py_IsInitialized() && PyGILState_Check();
    bool done;
    if (has_gil) {
      ReleaseGil release;
      done = step();
      check_running();
    } else {
      done = step();
      check_running();
    }
    if (done || (on_signal == OnSignal::kReturn && has_deferred_signal())) return;
    AcquireGil gil;
    if (on_signal == OnSignal::kRaise) {
      collect_deferred();
      raise_signals();
    }
    reports.report(std::chrono::duration<double>(Clock::now() - start).count(), describe);
  }
}

std::string describe_work(const Work& work) {
  if (!work.plan) return "an event";
  const char* stage = work.plan->state == Plan::kNew ? "being compiled" : "waiting for its turn";
  return "region of " + std::to_string(work.plan->node->depth) + " ops, cut: " + work.reason + " (" + work.line +
         "), " + stage;
}

// What the queue stands at.
std::string describe_front() {
  QueueLock lock;
  return queue->works.empty() ? "the device to finish" : describe_work(*queue->works.front());
}

// The queued region that makes this value.
std::string describe_maker(const BufferRef& buffer) {
  {
    QueueLock lock;
    for (const auto& work : queue->works) {
      for (const auto& output : work->outputs) {
        if (output == buffer) return describe_work(*work);
      }
    }
  }
  return describe_front();
}

void launch_loop();
void plan_loop();

// Under queue->mutex.
void start_threads() {
  if (queue->has_started || queue->is_stopping) return;
  queue->has_started = true;
  for (auto* loop : {&launch_loop, &plan_loop}) {
    queue->num_running++;
    queue->handles.emplace_back([loop] {
      loop();
      QueueLock lock;
      queue->num_running--;
      queue->changed.notify_all();
    });
  }
}

// What fails without being launched, as an earlier region has, waits for no compile, but where ranks wait for it.
bool is_launchable(const Work& work) {
  if (!work.plan || work.plan->state != Plan::kNew) return true;
  return work.plan->is_planned && !work.plan->has_effects && work.transaction->error;
}

bool is_pending(const Buffer& buffer) { return buffer.state.load(std::memory_order_acquire) == BufferState::kPending; }

// Whether a launch of the work before earlier ones leaves these, what fails of them and its own failure as they would
// be without it.  Where it comes to nothing it is launched again, with inputs whose memory no program has taken.
bool is_independent(const Work& work) {
  if (!work.plan || work.plan->state != Plan::kReady || work.ahead != Ahead::kNo || work.transaction->error)
    return false;
  bool takes_memory = std::ranges::any_of(work.plan->donated, std::identity());
  return (work.plan->is_pure || work.is_subgraph) && !takes_memory;
}

// The first work of those that make a value, where all of these may overtake the works before them.  Under
// queue->mutex; the caller holds queue->order.
std::deque<WorkRef>::iterator find_ahead(const Buffer* value) {
  std::unordered_set<const Buffer*> needed{value};
  auto first = queue->works.end();
  for (auto at = queue->works.end(); at != queue->works.begin();) {
    const Work& work = **--at;
    auto is_needed = [&](const BufferRef& buffer) { return needed.contains(buffer.get()); };
    if (std::ranges::none_of(work.outputs, is_needed)) continue;
    if (!is_independent(work)) return queue->works.end();
    first = at;
    for (const BufferRef& input : work.inputs) {
      if (is_pending(*input)) needed.insert(input.get());
    }
  }
  return first;
}

void finish(Work& work) {
  {
    QueueLock lock;
    work.is_done = true;
    queue->next_done = work.sequence + 1;
  }
  queue->changed.notify_all();
}

// A value somebody is copying to the host, who may need the GIL, must outlive a launch that takes its memory.
void await_readers(const Work& work) {
  auto is_read = [&] {
    for (size_t i = 0; i < work.inputs.size(); i++) {
      if (work.plan->donated[i] && work.inputs[i]->readers > 0) return true;
    }
    return false;
  };
  if (!is_read()) return;
  ReleaseGil release;
  while (is_read()) std::this_thread::yield();
}

// The GIL is held.
void run(Work& work, const WorkRef& ref) {
  if (!work.plan) {
    finish_device(work.device);
  } else {
    launch(ref);
  }
}

void call_engine(const WorkRef& work) {
  double started;
  {
    AcquireGil gil;
    if (work->plan) await_readers(*work);
    drain_decrefs();
    started = seconds_now();
    try {
      run(*work, work);
    } catch (python_error& error) {
      work_failed(*work, work->plan && work->plan->error ? work->plan->error : error.value);
    }
    if (work->ahead == Ahead::kNo) work->inputs.clear();  // else it may have to be launched again
    drain_decrefs();  // before younger arrays come: the garbage collector would look at both
  }
  work->finished_at = seconds_now();
  if (work->plan) work->plan->is_quick = work->finished_at - started < kQuickSeconds;
}

void launch_work(const WorkRef& work) {
  if (std::exchange(work->ahead, Ahead::kNo) == Ahead::kDone) {
    work_passed(*work);
  } else {
    call_engine(work);
  }
  finish(*work);
}

// Launches a work that somebody waits for, out of the queue, into which it goes back until its turn comes: where that
// comes to nothing, it is launched then.  The caller holds queue->order.
void launch_ahead(const WorkRef& work) {
  work->ahead = Ahead::kTrying;
  call_engine(work);
  bool is_done = work->outputs.empty();
  work->ahead = is_done ? Ahead::kDone : Ahead::kGivenUp;
  num_launched_ahead += is_done;
  if (is_done) {
    for (auto& input : work->inputs) input.reset();
  }
  {
    QueueLock lock;
    auto& works = queue->works;
    auto follows = [&](const WorkRef& other) { return other->sequence > work->sequence; };
    works.insert(std::find_if(works.begin(), works.end(), follows), work);
  }
  queue->changed.notify_all();
}

// Takes a work out of the queue that may overtake the front, for the sake of a thread that waits; null where none may.
// The caller holds queue->order.
WorkRef take_ahead() {
  QueueLock lock;
  if (queue->is_stopping || !queue->may_overtake) return nullptr;
  for (const Buffer* value : queue->awaited) {
    auto found = find_ahead(value);
    if (found == queue->works.end()) continue;
    WorkRef work = *found;
    queue->works.erase(found);
    return work;
  }
  queue->may_overtake = false;
  return nullptr;
}

// What may be launched now; null where nothing may.  The caller holds queue->order, so that it stays the front.
WorkRef launchable_front() {
  QueueLock lock;
  if (queue->is_stopping || queue->works.empty() || !is_launchable(*queue->works.front())) return nullptr;
  return queue->works.front();
}

void launch_front(const WorkRef& work) {
  {
    QueueLock lock;
    queue->works.pop_front();
  }
  launch_work(work);
}

// Launches the front in a thread that reads, where that is quick; the caller holds queue->order.
bool launch_quick_front() {
  WorkRef work = launchable_front();
  if (!work || !work->plan || !work->plan->is_quick) return false;
  AcquireGil gil;
  SignalsDeferred deferred;
  CollectionDeferred uncollected;
  if (work->ahead != Ahead::kDone && !prepare_directly(*work)) return false;
  launch_front(work);
  return true;
}

void launch_loop() {
  AcquireGil thread_state;  // kept for the thread's life: acquiring again is then cheap
  ReleaseGil idle;
  for (;;) {
    bool is_urgent;
    {
      QueueLock lock;
      queue->to_launch.wait(lock, [] {
        bool can_launch = queue->may_overtake || (!queue->works.empty() && is_launchable(*queue->works.front()));
        queue->is_idle = !can_launch;
        return can_launch || queue->is_stopping;
      });
      queue->to_launch.wait_for(lock, kLaunchDelay, [] { return queue->is_stopping || queue->is_urgent; });
      is_urgent = std::exchange(queue->is_urgent, false);
      if (queue->is_stopping) return;
    }
    std::lock_guard<std::mutex> order(queue->order);
    if (!is_urgent) await_gil();
    AcquireGil gil;  // once for all that wait
    took_gil();
    CollectionDeferred uncollected;
    for (;;) {
      if (WorkRef front = launchable_front()) {
        launch_front(front);
      } else if (WorkRef work = take_ahead()) {
        launch_ahead(work);
      } else {
        break;
      }
    }
  }
}

void notify() {
  {
    QueueLock lock;
    queue->may_overtake = !queue->awaited.empty();
  }
  queue->to_launch.notify_one();
  queue->changed.notify_all();
}

void plan_loop() {
  AcquireGil thread_state;
  ReleaseGil idle;
  for (;;) {
    std::shared_ptr<Plan> next;
    {
      QueueLock lock;
      queue->to_plan.wait(lock, [] { return queue->is_stopping || !queue->plans.empty(); });
      if (queue->is_stopping) return;
      next = queue->plans.front();
      queue->plans.pop_front();
    }
    {
      AcquireGil gil;
      CollectionDeferred uncollected;
      plan(next);
    }
    next->is_planned = true;
    notify();
  }
}

// A child's tensors die under these locks: no other thread may hold one while the process forks.
[[maybe_unused]] const bool fork_handlers = [] {
  pthread_atfork(
      [] {
        queue->mutex.lock();
        lock_all_spin_locks();
      },
      [] {
        unlock_all_spin_locks();
        queue->mutex.unlock();
      },
      [] {
        bool is_in_use = queue->has_started || runtime.num_threads > 0;
        if (is_in_use) runtime.process = Process::kForked;
        unlock_all_spin_locks();
        queue->mutex.unlock();
      });
  return true;
}();

}  // namespace

std::atomic<int> num_reading{0};
std::atomic<bool> has_arrivals{false};
std::atomic<int64_t> num_launched_ahead{0};

void refuse_or_sleep() {
  TORCH_CHECK(runtime.process != Process::kForked,
              "Cannot re-initialize tpu in forked subprocess. To use tpu with multiprocessing, you must use the "
              "'spawn' start method");
  {
    QueueLock lock;
    if (queue->stopper == std::this_thread::get_id()) return;
  }
  if (PyGILState_Check()) PyEval_SaveThread();
  num_asleep++;
  for (;;) pause();
}

Plan::~Plan() {
  defer_decref(executable);
  defer_decref(error);
  defer_decref(direct_holder);
}

void enqueue_plan(std::shared_ptr<Plan> plan) {
  state_lock.assert_held();
  arrivals->plans.push_back(std::move(plan));
  has_arrivals.store(true, std::memory_order_relaxed);
}

void enqueue(WorkRef work) {
  state_lock.assert_held();
  work->cut_at = seconds_now();
  arrivals->works.push_back(std::move(work));
  has_arrivals.store(true, std::memory_order_relaxed);
}

void wake_launcher() {
  check_running();
  bool is_idle;
  {
    QueueLock lock;
    start_threads();
    is_idle = std::exchange(queue->is_idle, false);
  }
  if (is_idle) queue->to_launch.notify_one();
}

void hurry_launcher() {
  check_running();
  {
    QueueLock lock;
    start_threads();
    queue->is_urgent = true;
  }
  queue->to_launch.notify_one();
  hurry_gil();
}

int64_t queue_length() {
  QueueLock lock;
  return static_cast<int64_t>(queue->next_sequence - queue->next_done);
}

// Raises nothing: the op that waits here is recorded already, perhaps as one of many that the user called as one.  A
// signal ends the wait instead.
void throttle() {
  if (queue_length() <= runtime.limits.max_in_flight) return;
  hurry_launcher();
  SignalsDeferred deferred;
  wait_until(
      [] {
        return queue->is_stopping ||
               static_cast<int64_t>(queue->next_sequence - queue->next_done) <= runtime.limits.max_in_flight;
      },
      [] { return describe_front(); }, OnSignal::kReturn);
}

namespace {
// While it lives a thread waits for the value, which may be launched before what was cut earlier.
class Awaiting {
 public:
  explicit Awaiting(const Buffer& value) : value_(&value) {
    QueueLock lock;
    queue->awaited.push_back(value_);
    queue->may_overtake = true;
  }
  ~Awaiting() {
    QueueLock lock;
    queue->awaited.erase(std::find(queue->awaited.begin(), queue->awaited.end(), value_));
  }

 private:
  const Buffer* value_;
};

// Launches what is quick in the thread that waits, which saves a hand-off, while `is_pending` and nobody else does.
template <class Pending>
void launch_here(Pending&& is_pending) {
  auto launch = [&] {
    std::unique_lock<std::mutex> order(queue->order, std::try_to_lock);
    while (order.owns_lock() && is_pending() && !has_deferred_signal() && launch_quick_front()) {
    }
  };
  if (PyGILState_Check()) {
    ReleaseGil release;
    launch();
  } else {
    launch();
  }
}

}  // namespace

void wait_ready(const BufferRef& buffer) {
  auto is_pending = [&] { return torchtpu::is_pending(*buffer); };
  if (!is_pending()) return;
  launch_here(is_pending);
  if (!is_pending()) return;
  Awaiting awaiting(*buffer);
  hurry_launcher();
  wait_until([&] { return !is_pending() || queue->is_stopping; }, [&] { return describe_maker(buffer); });
  TORCH_CHECK(!is_pending(), "tpu: the runtime was shut down before this value was computed");
}

void wait_done(const WorkRef& work) {
  hurry_launcher();
  wait_until([&] { return work->is_done || queue->is_stopping; }, [] { return describe_front(); });
}

void wait_all() {
  uint64_t last;
  {
    QueueLock lock;
    last = queue->next_sequence;
  }
  auto is_pending = [&] {
    QueueLock lock;
    return queue->next_done < last;
  };
  if (!is_pending()) return;
  launch_here(is_pending);
  if (!is_pending()) return;
  hurry_launcher();
  wait_until([&] { return queue->next_done >= last || queue->is_stopping; }, [] { return describe_front(); });
}

// ---- what the engine answers

void plan_ready(Plan& plan, PyObject* executable) {
  Py_INCREF(executable);
  plan.executable = executable;
  plan.before.reset();
  plan.state = Plan::kReady;
  notify();
}

void plan_failed(Plan& plan, PyObject* error) {
  Py_INCREF(error);
  plan.error = error;
  plan.before.reset();
  plan.state = Plan::kFailed;
  notify();
}

// ---- shutdown

namespace {

constexpr auto kIdlePatience = std::chrono::milliseconds(200);

bool await_threads(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  return queue->changed.wait_until(lock, deadline, [] { return queue->num_running == 0; });
}

// Other threads get the time to come to the recorder, where they sleep; whether they have.
bool await_sleep(int others, Clock::time_point deadline) {
  if (num_reading == 0) deadline = std::min(deadline, Clock::now() + kIdlePatience);
  while (num_asleep < others && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return num_asleep >= others;
}

}  // namespace

bool shutdown(double seconds) {
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  int others = runtime.num_threads - (has_recorded() ? 1 : 0);
  {
    QueueLock lock;
    queue->stopper = std::this_thread::get_id();
    runtime.process = Process::kEnds;  // first: a thread that finds the queue stopping sleeps
    queue->is_stopping = true;
  }
  queue->to_launch.notify_one();
  queue->to_plan.notify_one();
  queue->changed.notify_all();
  ReleaseGil release;
  bool have_ended = await_threads(deadline);
  for (auto& thread : queue->handles) have_ended ? thread.join() : thread.detach();
  queue->handles.clear();
  bool are_asleep = await_sleep(others, deadline);
  return have_ended && are_asleep;
}

}  // namespace torchtpu
