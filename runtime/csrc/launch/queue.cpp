#include "launch/queue.h"

#include <pthread.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "bind/bridge.h"
#include "launch/handover.h"

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
  bool is_idle = false;    // the launcher waits for work
  bool is_urgent = false;  // a thread waits for what the launcher does
  uint64_t next_sequence = 0, next_done = 0;
  bool is_stopping = false;
  std::thread::id stopper;  // the thread that stops
  std::vector<std::thread> threads;

  // Held while the front of `works` is launched: launches happen in one order, in whichever thread is there first.
  // Never waited for with the GIL or `mutex` held.
  std::mutex order;
};
Queue* queue = new Queue();

std::atomic<int> num_asleep{0};

// How long a cut region waits for company before it is launched; one that somebody waits for does not.  Each time that
// the launcher takes the GIL costs the recording thread what some twenty ops cost.
constexpr auto kLaunchDelay = std::chrono::milliseconds(1);
// A launch may run the program, and Ctrl-C waits for it.  One that is no longer than waits between two looks for Ctrl-C
// may as well be done by the reading thread.
constexpr double kQuickSeconds = 0.05;
constexpr auto kLookEvery = std::chrono::milliseconds(100);
constexpr double kFirstLogSeconds = 3, kLogEverySeconds = 10;

// Waits for `ready` under queue->mutex, GIL released, Ctrl-C checked; a long wait logs what `describe` says.
template <class Ready, class Describe>
void wait_until(Ready&& ready, Describe&& describe) {
  auto start = Clock::now();
  double next_log = kFirstLogSeconds;
  for (;;) {
    auto step = [&] {
      std::unique_lock<std::mutex> lock(queue->mutex);
      return queue->changed.wait_for(lock, kLookEvery, ready);
    };
    bool has_gil = Py_IsInitialized() && PyGILState_Check();
    bool done;
    if (has_gil) {
      py::gil_scoped_release release;
      done = step();
      check_running();
    } else {
      done = step();
      check_running();
    }
    if (done) return;
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw_python_error();
    double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited < next_log) continue;
    next_log += kLogEverySeconds;
    report_waiting(describe(), waited);
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
  std::lock_guard<std::mutex> lock(queue->mutex);
  return queue->works.empty() ? "the device to finish" : describe_work(*queue->works.front());
}

// The queued region that makes this value.
std::string describe_maker(const BufferRef& buffer) {
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
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

void start_threads() {
  if (!queue->threads.empty() || queue->is_stopping) return;
  queue->threads.emplace_back(launch_loop);
  queue->threads.emplace_back(plan_loop);
}

bool is_launchable(const Work& work) { return !work.plan || work.plan->state != Plan::kNew; }

void finish(Work& work) {
  for (auto& input : work.inputs) input.reset();
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
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
  py::gil_scoped_release release;
  while (is_read()) std::this_thread::yield();
}

// The GIL is held.
void run(Work& work, const WorkRef& ref) {
  if (!work.plan) {
    finish_device(work.device);
  } else if (work.plan->state == Plan::kFailed) {
    work_failed(work, work.plan->error);
  } else {
    launch(ref);
  }
}

void launch_work(const WorkRef& work) {
  double started;
  {
    py::gil_scoped_acquire gil;
    if (work->plan) await_readers(*work);
    drain_decrefs();
    started = seconds_now();
    try {
      run(*work, work);
    } catch (python_error& error) {
      work_failed(*work, error.value);
    }
  }
  work->finished_at = seconds_now();
  if (work->plan) work->plan->is_quick = work->finished_at - started < kQuickSeconds;
  finish(*work);
}

// Launches the front where that is possible now, and quick if it must be; the caller holds queue->order.
bool launch_front(bool must_be_quick) {
  WorkRef work;
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    if (queue->is_stopping || queue->works.empty() || !is_launchable(*queue->works.front())) return false;
    work = queue->works.front();
    if (must_be_quick && !(work->plan && work->plan->is_quick)) return false;
    queue->works.pop_front();
  }
  launch_work(work);
  return true;
}

void launch_loop() {
  py::gil_scoped_acquire thread_state;  // kept for the thread's life: acquiring again is then cheap
  py::gil_scoped_release idle;
  for (;;) {
    bool is_urgent;
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->to_launch.wait(lock, [] {
        bool can_launch = !queue->works.empty() && is_launchable(*queue->works.front());
        queue->is_idle = !can_launch;
        return can_launch || queue->is_stopping;
      });
      queue->to_launch.wait_for(lock, kLaunchDelay, [] { return queue->is_stopping || queue->is_urgent; });
      is_urgent = std::exchange(queue->is_urgent, false);
      if (queue->is_stopping) return;
    }
    std::lock_guard<std::mutex> order(queue->order);
    if (!is_urgent) await_gil();
    py::gil_scoped_acquire gil;  // once for all that wait
    took_gil();
    while (launch_front(/*must_be_quick=*/false)) {
    }
  }
}

void plan_loop() {
  py::gil_scoped_acquire thread_state;
  py::gil_scoped_release idle;
  for (;;) {
    std::shared_ptr<Plan> next;
    {
      std::unique_lock<std::mutex> lock(queue->mutex);
      queue->to_plan.wait(lock, [] { return queue->is_stopping || !queue->plans.empty(); });
      if (queue->is_stopping) return;
      next = queue->plans.front();
      queue->plans.pop_front();
    }
    py::gil_scoped_acquire gil;
    plan(next);
  }
}

// A child's tensors die under these locks: no other thread may hold one while the process forks.
[[maybe_unused]] const bool fork_handlers = [] {
  pthread_atfork(
      [] {
        state_lock.lock();
        queue->mutex.lock();
        decref_lock.lock();
      },
      [] {
        decref_lock.unlock();
        queue->mutex.unlock();
        state_lock.unlock();
      },
      [] {
        process = Process::kForked;
        decref_lock.unlock();
        queue->mutex.unlock();
        state_lock.unlock();
      });
  return true;
}();

}  // namespace

std::atomic<Process> process{Process::kRuns};
std::atomic<int> num_reading{0};

void refuse_or_sleep() {
  TORCH_CHECK(process != Process::kForked,
              "Cannot re-initialize tpu in forked subprocess. To use tpu with multiprocessing, you must use the "
              "'spawn' start method");
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    if (queue->stopper == std::this_thread::get_id()) return;
  }
  if (PyGILState_Check()) PyEval_SaveThread();
  num_asleep++;
  for (;;) pause();
}

Plan::~Plan() {
  defer_decref(executable);
  defer_decref(error);
}

void enqueue_plan(std::shared_ptr<Plan> plan) {
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    queue->plans.push_back(std::move(plan));
  }
  queue->to_plan.notify_one();
}

void enqueue(WorkRef work) {
  work->cut_at = seconds_now();
  std::lock_guard<std::mutex> lock(queue->mutex);
  work->sequence = queue->next_sequence++;
  queue->works.push_back(std::move(work));
}

void wake_launcher() {
  check_running();
  bool is_idle;
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    start_threads();
    is_idle = std::exchange(queue->is_idle, false);
  }
  if (is_idle) queue->to_launch.notify_one();
}

void hurry_launcher() {
  check_running();
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    start_threads();
    queue->is_urgent = true;
  }
  queue->to_launch.notify_one();
  hurry_gil();
}

int64_t queue_length() {
  std::lock_guard<std::mutex> lock(queue->mutex);
  return static_cast<int64_t>(queue->next_sequence - queue->next_done);
}

void throttle() {
  if (queue_length() <= limits.max_in_flight) return;
  hurry_launcher();
  wait_until(
      [] {
        return queue->is_stopping ||
               static_cast<int64_t>(queue->next_sequence - queue->next_done) <= limits.max_in_flight;
      },
      [] { return describe_front(); });
}

void wait_ready(const BufferRef& buffer) {
  auto is_pending = [&] { return buffer->state.load(std::memory_order_acquire) == BufferState::kPending; };
  if (!is_pending()) return;
  auto launch_here = [&] {
    std::unique_lock<std::mutex> order(queue->order, std::try_to_lock);
    while (order.owns_lock() && is_pending() && launch_front(/*must_be_quick=*/true)) {
    }
  };
  if (PyGILState_Check()) {
    py::gil_scoped_release release;
    launch_here();
  } else {
    launch_here();
  }
  if (!is_pending()) return;
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
    std::lock_guard<std::mutex> lock(queue->mutex);
    last = queue->next_sequence;
  }
  if (queue_length() == 0) return;
  hurry_launcher();
  wait_until([&] { return queue->next_done >= last || queue->is_stopping; }, [] { return describe_front(); });
}

// ---- what the engine answers

namespace {
void notify() {
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
  }
  queue->to_launch.notify_one();
  queue->changed.notify_all();
}
}  // namespace

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

constexpr auto kIdlePatience = std::chrono::milliseconds(200), kReadingPatience = std::chrono::milliseconds(5000);

// Other threads get the time to come to the recorder, where they sleep: one that is still inside a binding when the
// interpreter ends would abort the process as it takes the GIL.
void await_sleep(int others) {
  auto start = Clock::now();
  while (num_asleep < others && Clock::now() - start < (num_reading > 0 ? kReadingPatience : kIdlePatience)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void shutdown() {
  {
    std::lock_guard<std::mutex> lock(queue->mutex);
    queue->is_stopping = true;
    queue->stopper = std::this_thread::get_id();
  }
  int others = num_threads - (has_recorded() ? 1 : 0);
  process = Process::kEnds;
  queue->to_launch.notify_one();
  queue->to_plan.notify_one();
  queue->changed.notify_all();
  py::gil_scoped_release release;
  for (auto& thread : queue->threads) thread.join();
  queue->threads.clear();
  await_sleep(others);
}

}  // namespace torchtpu
