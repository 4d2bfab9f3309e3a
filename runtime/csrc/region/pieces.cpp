// A stream is cut where an op's hash is the largest of the next four.  Equal stretches of different streams, at any
// place of them, are so divided alike, and a piece does not know where it stood: where a view begins, or the gradient
// of one, is a run-time number, lists are taken apart, and what nobody needs is left out.  What happens to an element
// of a list is a piece, whatever its place, and so are many ops in a row that read nothing.

#include "region/pieces.h"

#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "region/fields.h"

namespace torchtpu {

namespace {

constexpr size_t kMostOps = 4;           // of a piece
constexpr size_t kMostOfElement = 16;    // ops that happen to an element of a list, in a piece of their own
constexpr size_t kFewestFills = 8;       // ops in a row that read nothing, as where an optimizer's states are made,
constexpr size_t kMostFills = 256;       // which are pieces of so many
constexpr size_t kMostKnown = 1 << 16;   // signs, and pieces, that have a number
constexpr int64_t kNothing = INT64_MIN;  // where no value is taken

uint64_t finished(uint64_t hash) {
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdull;
  hash ^= hash >> 33;
  hash *= 0xc4ceb9fe1a85ec53ull;
  return hash ^ (hash >> 33);
}

uint64_t hash_of(const std::string& text, uint64_t hash = 0xcbf29ce484222325ull) {
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

struct Dtype {
  std::string text;
  int64_t itemsize;
};

const Dtype& dtype_of(PyObject* dtype) {
  static auto* known = new std::unordered_map<PyObject*, Dtype>();  // they live as long as the process
  auto it = known->find(dtype);
  if (it == known->end()) {
    Dtype made{py::str(py::handle(dtype)), as_int(get(dtype, fields().itemsize).ptr())};
    it = known->emplace(dtype, std::move(made)).first;
  }
  return it->second;
}

// A tensor, or a run-time number, that an op is given.
struct Operand {
  enum Kind : uint8_t { kTensor, kFloat, kInt } kind;
  int64_t value = kNothing;
  int64_t number = -1;   // a run-time number, or the one that says where the tensor begins
  int64_t offset = 0;    // where that is known, or an int that may become a run-time number
  bool is_part = false;  // whether it has elements, but fewer than its array
};

struct Target {
  int64_t value;
  size_t slot;  // of the tensor that is written
  Operand place;
};

}  // namespace

struct Divider::Call {
  size_t place;  // of the op
  int element;   // of its lists; -1 where they are not taken apart
  std::shared_ptr<Sign> sign;
  c10::SmallVector<Operand, 4> slots;
  c10::SmallVector<int64_t, 2> made;
  c10::SmallVector<Target, 1> targets;
  c10::SmallVector<int64_t, 1> unread;  // values of which only the shape is taken
  c10::SmallVector<int64_t, 2> ints;    // arguments, by place, that are ints and become run-time numbers
};

namespace {

using Call = Divider::Call;

// Reads one op, or what it does to one element of its lists.
class Reader {
 public:
  Reader(PyObject* op, int element, Py_ssize_t count, uint64_t ints, Call& call)
      : op_(op), element_(element), count_(count), ints_(ints), call_(call) {}

  // What decides the op's text, and what of that says nothing of sizes.
  std::pair<std::string, std::string> read() {
    const Fields& f = fields();
    put_name(get(op_, f.name).ptr());
    argument(get(op_, f.settings).ptr());
    auto args = get(op_, f.args);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args.ptr()); i++) {
      arg_ = i;
      top(PyTuple_GET_ITEM(args.ptr(), i));
    }
    both('>');
    auto results = get(op_, f.results);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results.ptr()); i++) {
      PyObject* given = PyTuple_GET_ITEM(results.ptr(), i);
      if (is_list(given)) {
        both('(');
        result(PyTuple_GET_ITEM(given, element_));
        both(')');
      } else {
        result(given);
      }
    }
    auto writes = get(op_, f.writes);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(writes.ptr()); i++) write(PyTuple_GET_ITEM(writes.ptr(), i));
    return {std::move(text_), std::move(mark_)};
  }

 private:
  template <class T>
  void both(const T& given) {
    text_ += given;
    mark_ += given;
  }
  void put_name(PyObject* given) {
    put_text(text_, given);
    put_text(mark_, given);
  }

  bool is_list(PyObject* given) const {
    return element_ >= 0 && PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == count_;
  }

  void top(PyObject* given) {
    if (is_list(given)) {
      both('(');
      item_ = 0;
      argument(PyTuple_GET_ITEM(given, element_));
      both(')');
    } else if (PyTuple_CheckExact(given) || PyList_CheckExact(given)) {
      list(given, true);
    } else if (arg_ < 64 && (ints_ >> arg_ & 1) && PyLong_CheckExact(given) && is_small(given)) {
      both('I');
      Operand slot{Operand::kInt};
      slot.offset = as_int(given);
      call_.slots.push_back(slot);
      call_.ints.push_back(arg_);
    } else {
      item_ = -1;
      argument(given);
    }
  }

  void list(PyObject* given, bool is_top) {
    both('(');
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given); i++) {
      if (is_top) item_ = static_cast<int>(i);
      argument(PySequence_Fast_GET_ITEM(given, i));
    }
    both(')');
  }

  void argument(PyObject* given) {
    const Fields& f = fields();
    if (given == Py_None) {
      both('N');
    } else if (is_a(given, f.operand)) {
      both('T');
      Operand slot{Operand::kTensor};
      auto value = get(given, f.value);
      if (!value.is_none()) slot.value = as_int(value.ptr());
      tensor(given, slot);
      where_.push_back({arg_, item_, call_.slots.size()});
      call_.slots.push_back(slot);
    } else if (is_a(given, f.lifted)) {
      both(lifted(given));
    } else if (is_a(given, f.scalar)) {
      both('S');
      argument(get(given, f.value).ptr());
      both(dtype_of(get(given, f.dtype).ptr()).text);
      both(get(given, f.wrapped).ptr() == Py_True ? 'w' : '-');
    } else if (is_a(given, f.random)) {
      both('R');
      lifted(get(given, f.seed).ptr());
      lifted(get(given, f.offset).ptr());
    } else if (PyTuple_CheckExact(given) || PyList_CheckExact(given)) {
      list(given, false);
    } else if (PyBool_Check(given)) {
      both(given == Py_True ? "b1" : "b0");
    } else if (PyFloat_CheckExact(given)) {
      both('f');
      put(text_, PyFloat_AS_DOUBLE(given));
    } else if (PyUnicode_CheckExact(given)) {
      both('s');
      put_name(given);
    } else if (THPDtype_Check(given)) {
      both('d');
      both(dtype_of(given).text);
    } else if (is_a(given, f.device)) {
      both('v');
      put_name(get(given, f.type).ptr());
    } else if (PyLong_CheckExact(given) && is_small(given)) {
      both('i');
      put(text_, as_int(given));
    } else {
      both('r');
      put_name(py::repr(py::handle(given)).ptr());
    }
  }

  char lifted(PyObject* given) {
    const Fields& f = fields();
    auto kind = get(given, f.kind);
    bool is_float = PyUnicode_READ_CHAR(kind.ptr(), 0) == 'f';
    Operand slot{is_float ? Operand::kFloat : Operand::kInt};
    slot.number = as_int(get(given, f.index).ptr());
    call_.slots.push_back(slot);
    return is_float ? 'F' : 'I';
  }

  int64_t ints(PyObject* given) {
    int64_t product = 1;
    both('[');
    put(text_, PyTuple_GET_SIZE(given));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) {
      int64_t number = as_int(PyTuple_GET_ITEM(given, i));
      put(text_, number);
      product *= number;
    }
    both(']');
    return product;
  }

  // A tensor's geometry, and in `slot` where it begins.
  void tensor(PyObject* given, Operand& slot) {
    const Fields& f = fields();
    const Dtype& dtype = dtype_of(get(given, f.dtype).ptr());
    int64_t taken = ints(get(given, f.sizes).ptr()) * dtype.itemsize;
    ints(get(given, f.strides).ptr());
    auto base = get(given, f.base);
    const Dtype& home = dtype_of(PyTuple_GET_ITEM(base.ptr(), 1));
    int64_t whole = ints(PyTuple_GET_ITEM(base.ptr(), 0)) * home.itemsize;
    both(dtype.text);
    both(home.text);
    slot.is_part = 0 < taken && taken < whole;
    if (auto offset = get(given, f.offset); is_a(offset.ptr(), f.lifted)) {
      both('o');
      slot.number = as_int(get(offset.ptr(), f.index).ptr());
    } else {
      slot.offset = as_int(offset.ptr());
    }
  }

  void result(PyObject* given) {
    const Fields& f = fields();
    if (given == Py_None) {
      both('-');
    } else if (PyTuple_CheckExact(given)) {
      both('(');
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); i++) result(PyTuple_GET_ITEM(given, i));
      both(')');
    } else {
      call_.made.push_back(as_int(get(given, f.value).ptr()));
      ints(get(given, f.sizes).ptr());
      ints(get(given, f.strides).ptr());
      both(dtype_of(get(given, f.dtype).ptr()).text);
      auto base = get(given, f.base);
      ints(PyTuple_GET_ITEM(base.ptr(), 0));
      both(dtype_of(PyTuple_GET_ITEM(base.ptr(), 1)).text);
    }
  }

  void write(PyObject* given) {
    const Fields& f = fields();
    int64_t arg = as_int(get(given, f.arg).ptr());
    auto element = get(given, f.element);
    int item = element.is_none() ? -1 : static_cast<int>(as_int(element.ptr()));
    if (element_ >= 0) {
      if (item != element_) return;
      item = 0;
    }
    both('=');
    put(text_, arg);
    put(text_, item);
    both(get(given, f.replaces).ptr() == Py_True ? 'r' : '-');
    Target target{as_int(get(given, f.value).ptr()), 0, Operand{Operand::kTensor}};
    tensor(given, target.place);
    auto of = [&](const Where& w) { return w.arg == arg && w.item == item; };
    auto found = std::find_if(where_.begin(), where_.end(), of);
    TORCH_CHECK(found != where_.end(), "torchtpu: an op writes what it is not given");
    target.slot = found->slot;
    call_.targets.push_back(target);
  }

  struct Where {
    int64_t arg;
    int item;
    size_t slot;
  };
  PyObject* op_;
  int element_;
  Py_ssize_t count_;
  uint64_t ints_;
  Call& call_;
  std::string text_, mark_;
  c10::SmallVector<Where, 4> where_;
  int64_t arg_ = 0;
  int item_ = -1;
};

// How many elements an op's lists have; 0 where there are none.
Py_ssize_t length_of_lists(PyObject* args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
    PyObject* given = PyTuple_GET_ITEM(args, i);
    if (PyTuple_CheckExact(given)) return PyTuple_GET_SIZE(given);
  }
  return 0;
}

bool has_list_of_tensors(PyObject* args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
    PyObject* given = PyTuple_GET_ITEM(args, i);
    if (!PyTuple_CheckExact(given)) continue;
    for (Py_ssize_t e = 0; e < PyTuple_GET_SIZE(given); e++) {
      if (is_a(PyTuple_GET_ITEM(given, e), fields().operand)) return true;
    }
  }
  return false;
}

// Whether two elements write into one storage.
bool writes_twice(const std::vector<Call>& row) {
  std::vector<int64_t> written;
  for (const Call& call : row) {
    for (const Target& target : call.targets) {
      int64_t value = call.slots[target.slot].value;
      if (value == kNothing) continue;
      if (std::find(written.begin(), written.end(), value) != written.end()) return true;
      written.push_back(value);
    }
  }
  return false;
}

py::tuple as_tuple(const std::vector<int64_t>& values) {
  py::tuple made(values.size());
  for (size_t i = 0; i < values.size(); i++) made[i] = py::int_(values[i]);
  return made;
}

// Counts the values and run-time numbers of a piece as they appear in it.
class Numbers {
 public:
  int32_t read(int64_t value) {
    if (value == kNothing) return INT32_MIN;
    for (size_t i = 0; i < made.size(); i++) {
      if (made[i] == value) return static_cast<int32_t>(i);
    }
    return ~place_of(inputs, value);
  }
  static int32_t place_of(std::vector<int64_t>& known, int64_t number) {
    auto it = std::find(known.begin(), known.end(), number);
    if (it == known.end()) it = known.insert(it, number);
    return static_cast<int32_t>(it - known.begin());
  }
  std::vector<int64_t> inputs, made, floats, ints, offsets;
};

// Views, and ints, have a number each, also where they are the same: that may be chance.
void put_offset(std::string& text, const Operand& slot, Numbers& numbers) {
  if (slot.number >= 0) {
    text += 'l';
    put(text, Numbers::place_of(numbers.ints, slot.number));
  } else if (slot.is_part || slot.kind == Operand::kInt) {
    text += 'p';
    numbers.offsets.push_back(slot.offset);
  } else {
    put(text, slot.offset);
  }
}

bool begins_with(const Operand& slot, const Operand& other) {
  return slot.number == other.number && slot.offset == other.offset && slot.is_part == other.is_part;
}

void put_call(std::string& text, const Call& call, Numbers& numbers) {
  put(text, call.sign->number);
  for (const Operand& slot : call.slots) {
    if (slot.kind == Operand::kTensor) {
      put(text, numbers.read(slot.value));
      put_offset(text, slot, numbers);
    } else if (slot.kind == Operand::kInt) {
      put_offset(text, slot, numbers);
    } else {
      put(text, Numbers::place_of(numbers.floats, slot.number));
    }
  }
  numbers.made.insert(numbers.made.end(), call.made.begin(), call.made.end());
  for (const Target& target : call.targets) {
    numbers.made.push_back(target.value);
    if (!begins_with(target.place, call.slots[target.slot])) put_offset(text += 'a', target.place, numbers);
  }
}

uint64_t mark_of(const Call& call) {
  uint64_t hash = call.sign->hash;
  for (const Operand& slot : call.slots)
    hash = finished(hash + (slot.kind == Operand::kTensor && slot.value == kNothing));
  return hash;
}

bool reads_nothing(const Call& call) {
  return std::all_of(call.slots.begin(), call.slots.end(),
                     [](const Operand& slot) { return slot.kind == Operand::kTensor && slot.value == kNothing; });
}

}  // namespace

std::vector<size_t> ends_of(const std::vector<uint64_t>& hashes, size_t most_ops) {
  std::vector<size_t> ends;
  for (size_t start = 0; hashes.size() - start > most_ops;) {
    size_t largest = start;
    for (size_t place = start; place < start + most_ops; place++) {
      if (hashes[place] >= hashes[largest]) largest = place;
    }
    ends.push_back(start = largest + 1);
  }
  return ends;
}

bool Divider::maps(const std::string& name, py::handle op) {
  auto it = goes_in_step_.find(name);
  if (it != goes_in_step_.end()) return it->second;
  bool found = maps_(op).cast<bool>();
  goes_in_step_[name] = found;
  return found;
}

uint64_t Divider::ints(const std::string& name, py::handle op) {
  auto it = takes_ints_.find(name);
  if (it != takes_ints_.end()) return it->second;
  uint64_t found = 0;
  for (auto place : ints_(op)) found |= uint64_t{1} << place.cast<int>();
  takes_ints_[name] = found;
  return found;
}

std::shared_ptr<Sign> Divider::sign_of(const std::string& text, const std::string& mark) {
  static uint32_t count = 0;
  auto& known = signs_[text];
  if (!known) known = std::make_shared<Sign>(Sign{count++, finished(hash_of(mark))});
  return known;
}

int64_t Divider::identity_of(const std::string& text) {
  static int64_t count = 0;
  auto [it, is_new] = identities_.try_emplace(text, count);
  count += is_new;
  return it->second;
}

// The ops, those that go in step through their lists as one per element.  Of consecutive ones all that happens to the
// first element comes first, where no element needs another one.
std::vector<Call> Divider::calls_of(const py::tuple& ops) {
  std::vector<Call> calls;
  std::vector<std::vector<Call>> rows;        // consecutive ones, taken apart
  std::unordered_map<int64_t, size_t> homes;  // the elements to which the values belong that these make
  auto flush = [&] {
    for (size_t e = 0; !rows.empty() && e < rows[0].size(); e++) {
      for (auto& row : rows) calls.push_back(std::move(row[e]));
    }
    rows.clear();
    homes.clear();
  };
  auto is_apart = [&](const std::vector<Call>& row) {
    for (size_t e = 0; e < row.size(); e++) {
      for (const Operand& slot : row[e].slots) {
        auto home = homes.find(slot.value);
        if (slot.kind == Operand::kTensor && home != homes.end() && home->second != e) return false;
      }
    }
    return true;
  };
  for (size_t place = 0; place < ops.size(); place++) {
    PyObject* op = PyTuple_GET_ITEM(ops.ptr(), place);
    auto args = get(op, fields().args);
    auto name = get(op, fields().name).cast<std::string>();
    std::vector<Call> row;
    auto read = [&](int element, Py_ssize_t count) {
      Call call{place, element};
      auto [text, mark] = Reader(op, element, count, ints(name, op), call).read();
      call.sign = sign_of(text, mark);
      return call;
    };
    if (has_list_of_tensors(args.ptr()) && maps(name, op)) {
      Py_ssize_t count = length_of_lists(args.ptr());
      for (Py_ssize_t e = 0; count >= 2 && e < count; e++) row.push_back(read(static_cast<int>(e), count));
      if (writes_twice(row)) row.clear();
    }
    if (!rows.empty() && (row.size() != rows[0].size() || !is_apart(row))) flush();
    if (row.empty()) {
      calls.push_back(read(-1, 0));
    } else {
      for (size_t e = 0; e < row.size(); e++) {
        for (int64_t value : row[e].made) homes[value] = e;
        for (const Target& target : row[e].targets) homes[target.value] = e;
      }
      rows.push_back(std::move(row));
    }
  }
  flush();
  return calls;
}

// Asks for what is not known of the ops.
void Divider::learn(const std::vector<Call>& calls, const py::tuple& ops) {
  std::vector<std::shared_ptr<Sign>> signs;
  std::vector<uint32_t> asked;
  py::list given;
  for (const Call& call : calls) {
    uint32_t number = call.sign->number;
    if (call.sign->is_known || std::find(asked.begin(), asked.end(), number) != asked.end()) continue;
    asked.push_back(number);
    signs.push_back(call.sign);
    given.append(py::make_tuple(ops[call.place], call.element));
  }
  if (signs.empty()) return;
  py::list found = facts_(given);
  for (size_t i = 0; i < signs.size(); i++) {
    auto row = found[i].cast<py::tuple>();
    signs[i]->has_checks = row[0].cast<bool>();
    signs[i]->used = row[1].cast<std::vector<uint32_t>>();
    signs[i]->is_known = true;
  }
}

py::list Divider::divide(const py::object& program, const std::vector<size_t>& apart, const std::vector<size_t>& alone,
                         bool is_often_new) {
  const Fields& f = fields();
  if (signs_.size() > kMostKnown) signs_.clear();
  if (identities_.size() > kMostKnown) identities_.clear();
  py::tuple ops = get(program.ptr(), f.ops);
  std::vector<Call> calls = calls_of(ops);
  learn(calls, ops);

  auto num_inputs = static_cast<int64_t>(py::len(get(program.ptr(), f.inputs)));
  int64_t num_values = 0;
  for (const Call& call : calls) {
    for (int64_t value : call.made) num_values = std::max(num_values, value + 1);
    for (const Target& target : call.targets) num_values = std::max(num_values, target.value + 1);
  }
  auto at = [&](int64_t value) { return static_cast<size_t>(value + num_inputs); };
  std::vector<uint8_t> is_kept(num_inputs + num_values), is_given_up(num_inputs);
  for (auto value : get(program.ptr(), f.outputs)) is_kept[at(value.cast<int64_t>())] = 1;
  for (auto input : get(program.ptr(), f.donated)) is_given_up[input.cast<int64_t>()] = 1;

  // What is needed, and of it what is not read.
  std::vector<uint8_t> is_needed = is_kept;
  std::vector<Call> kept;
  for (auto it = calls.rbegin(); it != calls.rend(); ++it) {
    Call& call = *it;
    bool is_wanted = call.sign->has_checks;
    for (int64_t value : call.made) is_wanted |= is_needed[at(value)];
    for (const Target& target : call.targets) is_wanted |= is_needed[at(target.value)];
    if (!is_wanted) continue;
    c10::SmallVector<int64_t, 4> read;
    auto note = [&](const Operand& slot) {
      if (slot.kind != Operand::kTensor || slot.value == kNothing) return;
      read.push_back(slot.value);
      is_needed[at(slot.value)] = 1;
    };
    for (uint32_t number : call.sign->used) note(call.slots[number]);
    for (const Target& target : call.targets) note(call.slots[target.slot]);
    for (Operand& slot : call.slots) {
      if (slot.kind != Operand::kTensor || slot.value == kNothing) continue;
      if (std::find(read.begin(), read.end(), slot.value) != read.end()) continue;
      call.unread.push_back(slot.value);
      slot.value = kNothing;
    }
    kept.push_back(std::move(call));
  }
  std::reverse(kept.begin(), kept.end());

  auto is_apart = [&](const Call& call) { return std::binary_search(apart.begin(), apart.end(), call.place); };
  auto is_alone = [&](const Call& call) { return std::binary_search(alone.begin(), alone.end(), call.place); };
  // What happens to an element, if that is more than an op, is in no piece with anything else: the order of elements is
  // another one in each program.
  auto is_of_element = [&](size_t place) {
    int element = kept[place].element;
    auto is_same = [&](size_t other) { return other < kept.size() && kept[other].element == element; };
    return element >= 0 && (is_same(place + 1) || (place > 0 && is_same(place - 1)));
  };
  std::vector<uint8_t> is_filling(kept.size());  // one of many in a row
  for (size_t place = 0, begin = 0; place <= kept.size(); place++) {
    if (place < kept.size() && !is_often_new && reads_nothing(kept[place])) continue;
    if (place - begin >= kFewestFills) std::fill(is_filling.begin() + begin, is_filling.begin() + place, 1);
    begin = place + 1;
  }
  auto is_border = [&](size_t place) {  // behind an op
    bool is_next_element = kept[place].element != kept[place + 1].element;
    return is_filling[place] != is_filling[place + 1] ||
           (is_next_element && (is_of_element(place) || is_of_element(place + 1)));
  };
  std::vector<size_t> ends;
  std::vector<uint64_t> marks;
  std::vector<uint8_t> is_copy(num_inputs + num_values);  // which are not donated: their number changes
  for (size_t place = 0; place < kept.size(); place++) {
    for (int64_t value : kept[place].made) is_copy[at(value)] = is_apart(kept[place]);
    marks.push_back(mark_of(kept[place]));
    bool is_last = place + 1 == kept.size() || is_apart(kept[place]) || is_apart(kept[place + 1]) || is_border(place);
    if (!is_last) continue;
    size_t begin = place + 1 - marks.size();
    size_t most_ops = is_filling[place] ? kMostFills : is_of_element(place) ? kMostOfElement : kMostOps;
    std::vector<size_t> found = ends_of(marks, most_ops);
    for (size_t i = 0, next = 0; i < marks.size(); i++) {  // behind `i`, and behind what is before one that is alone
      bool is_end = i + 1 == marks.size() || (next < found.size() && found[next] == i + 1);
      next += is_end;
      bool is_border_of_one = is_alone(kept[begin + i]) || (i + 1 < marks.size() && is_alone(kept[begin + i + 1]));
      if (is_end || is_border_of_one) ends.push_back(begin + i + 1);
    }
    marks.clear();
  }
  std::vector<int64_t> last(num_inputs + num_values, -1);  // the piece that reads a value last
  for (size_t place = 0, piece = 0; place < kept.size(); place++) {
    if (place == ends[piece]) piece++;
    for (const Operand& slot : kept[place].slots) {
      if (slot.kind == Operand::kTensor && slot.value != kNothing) last[at(slot.value)] = static_cast<int64_t>(piece);
    }
  }

  py::list pieces;
  py::object line = get(program.ptr(), f.line);
  for (size_t piece = 0, begin = 0; piece < ends.size(); begin = ends[piece++]) {
    std::string text;
    Numbers numbers;
    size_t count = ends[piece] - begin;
    put(text, count);
    py::tuple taken(count), lines(count + 1);
    lines[0] = line;
    for (size_t i = 0; i < count; i++) {
      const Call& call = kept[begin + i];
      put_call(text, call, numbers);
      py::tuple unread(call.unread.size());
      for (size_t k = 0; k < call.unread.size(); k++) unread[k] = py::int_(call.unread[k]);
      py::tuple ints(call.ints.size());
      for (size_t k = 0; k < call.ints.size(); k++) ints[k] = py::int_(call.ints[k]);
      taken[i] = py::make_tuple(call.place, call.element, unread, ints);
      lines[i + 1] = get(PyTuple_GET_ITEM(ops.ptr(), call.place), f.line);
    }
    std::vector<int64_t> outputs, made, donated;
    for (size_t i = 0; i < numbers.made.size(); i++) {
      int64_t value = numbers.made[i];
      if (!is_kept[at(value)] && last[at(value)] <= static_cast<int64_t>(piece)) continue;
      outputs.push_back(value);
      made.push_back(static_cast<int64_t>(i));
      text += '>';
      put(text, i);
    }
    for (size_t i = 0; i < numbers.inputs.size(); i++) {
      int64_t value = numbers.inputs[i];
      bool is_free = value < 0 ? is_given_up[~value] : !is_kept[at(value)];
      if (is_apart(kept[begin]) || (is_often_new && count == 1)) {
        const Call& call = kept[begin];
        is_free &= std::any_of(call.targets.begin(), call.targets.end(),
                               [&](const Target& target) { return call.slots[target.slot].value == value; });
      } else if (value >= 0) {
        is_free &= !is_copy[at(value)];
      }
      if (!is_free || last[at(value)] != static_cast<int64_t>(piece)) continue;
      donated.push_back(static_cast<int64_t>(i));
      text += '<';
      put(text, i);
    }
    pieces.append(py::make_tuple(identity_of(text), lines, taken, as_tuple(numbers.inputs), as_tuple(outputs),
                                 as_tuple(made), as_tuple(donated), as_tuple(numbers.floats), as_tuple(numbers.ints),
                                 as_tuple(numbers.offsets)));
  }
  return pieces;
}

void bind_pieces(py::module& m) {
  py::class_<Divider>(m, "Divider").def(py::init<py::object, py::object, py::object>()).def("divide", &Divider::divide);
  m.def("ends_of", [](const std::vector<uint64_t>& hashes) { return ends_of(hashes, kMostOps); });
}

}  // namespace torchtpu
