// Points in a device's order: an event is a work without a program.

#include "launch/queue.h"

namespace torchtpu {

namespace {

constexpr size_t kMostMarkers = 65536;  // older ones count as never reached

struct Markers {
  std::mutex mutex;
  std::map<int64_t, WorkRef> works;
  int64_t next = 1;
};
Markers* markers = new Markers();

WorkRef find(int64_t marker) {
  std::lock_guard<std::mutex> lock(markers->mutex);
  auto it = markers->works.find(marker);
  return it == markers->works.end() ? nullptr : it->second;
}

}  // namespace

int64_t record_marker(c10::DeviceIndex device) {
  cut(recorder_for(device), "event");
  auto work = std::make_shared<Work>();
  work->device = device;
  {
    StateGuard guard(state_lock);
    enqueue(work);
  }
  wake_launcher();
  std::lock_guard<std::mutex> lock(markers->mutex);
  markers->works[markers->next] = work;
  while (markers->works.size() > kMostMarkers) markers->works.erase(markers->works.begin());
  return markers->next++;
}

void wait_marker(int64_t marker) {
  if (auto work = find(marker)) wait_done(work);
}

double marker_time(int64_t marker) {
  auto work = find(marker);
  return work && work->is_done ? work->finished_at : -1;
}

}  // namespace torchtpu
