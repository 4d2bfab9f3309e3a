// Recurrent layers as one op for all their steps, where CUDA has cuDNN's, and packed sequences as gathers: what runs
// does not depend on how long the sequences are.

#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_pack_padded_sequence_native.h>
#include <ATen/ops/_pad_packed_sequence_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linear_backward.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace torchtpu {

namespace {

using at::Tensor, at::TensorList;
using torch::autograd::AutogradContext, torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

struct Cell {
  std::string name;  // as the ops have it
  int64_t gates;
  bool has_cells;  // a state beside the one it gives out
};

const Cell kLstm{"lstm", 4, true}, kGru{"gru", 3, false}, kTanh{"tanh", 1, false}, kRelu{"relu", 1, false};

const Cell& cell_named(const std::string& name) {
  for (const Cell* cell : {&kLstm, &kGru, &kTanh}) {
    if (cell->name == name) return *cell;
  }
  return kRelu;
}

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// ---- the ops: the last states, those after each step, and what backward needs beside them

std::vector<Tensor> call_layer(const Tensor& gates, const Tensor& hx, const OptionalTensor& cx, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& lengths, c10::string_view cell,
                               bool is_reverse) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchtpu::rnn_layer", "")
          .typed<std::vector<Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                     const OptionalTensor&, const OptionalTensor&, c10::string_view, bool)>();
  return op.call(gates, hx, cx, weight, bias, lengths, cell, is_reverse);
}

std::vector<Tensor> call_backward(const OptionalTensor& grad_output, const OptionalTensor& grad_hy,
                                  const OptionalTensor& grad_cy, const Tensor& hx, const OptionalTensor& cx,
                                  const Tensor& weight, const OptionalTensor& lengths, TensorList saved, bool has_bias,
                                  c10::string_view cell, bool is_reverse) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchtpu::rnn_layer_backward", "")
          .typed<std::vector<Tensor>(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                     const OptionalTensor&, const Tensor&, const OptionalTensor&, TensorList, bool,
                                     c10::string_view, bool)>();
  return op.call(grad_output, grad_hy, grad_cy, hx, cx, weight, lengths, saved, has_bias, cell, is_reverse);
}

// The same of ordinary ops, for what has derivatives of its own.
variable_list unrolled(const Tensor& input, const Tensor& hx, const Tensor& cx, const Tensor& input_weight,
                       const Tensor& weight, const Tensor& input_bias, const Tensor& bias, const Tensor& lengths,
                       const Cell& cell, bool is_reverse) {
  auto gates = at::linear(input, input_weight, optional(input_bias));
  int64_t steps = gates.size(0);
  variable_list outputs(steps);
  Tensor h = hx, c = cx;
  for (int64_t i = 0; i < steps; ++i) {
    int64_t step = is_reverse ? steps - 1 - i : i;
    Tensor x = gates.select(0, step), hidden = at::linear(h, weight, optional(bias)), next_h, next_c;
    if (cell.has_cells) {
      auto parts = (x + hidden).chunk(4, 1);
      next_c = parts[1].sigmoid() * c + parts[0].sigmoid() * parts[2].tanh();
      next_h = parts[3].sigmoid() * next_c.tanh();
    } else if (cell.gates == 3) {
      auto of_input = x.chunk(3, 1), of_hidden = hidden.chunk(3, 1);
      auto fresh = (of_input[2] + (of_input[0] + of_hidden[0]).sigmoid() * of_hidden[2]).tanh();
      next_h = fresh + (of_input[1] + of_hidden[1]).sigmoid() * (h - fresh);
    } else {
      next_h = cell.name == "tanh" ? (x + hidden).tanh() : (x + hidden).relu();
    }
    if (lengths.defined()) {
      auto runs = (lengths > step).unsqueeze(1);
      next_h = at::where(runs, next_h, h);
      if (cell.has_cells) next_c = at::where(runs, next_c, c);
    }
    h = outputs[step] = next_h;
    c = next_c;
  }
  variable_list made{at::stack(outputs), h};
  if (cell.has_cells) made.push_back(c);
  return made;
}

// Whether one of torch.func's transforms is at work, within which PyTorch refuses functions like those below, or what
// is below autograd has no rule for a tensor.
bool is_transformed(const Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped(
      {DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Batched});
  if (t.defined() && t.key_set().has_any(kWrapped)) {
    return true;
  }
  const auto& state = at::functorch::functorchTLSAccessor();
  if (!state) return false;
  try {
    state->checkSupportsCppAutogradFunction();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

// A layer in one direction: (steps, batch, features) to the output of each step and the last states.
struct RnnLayer : torch::autograd::Function<RnnLayer> {
  static variable_list forward(AutogradContext* context, const Tensor& input, const Tensor& hx,
                               const OptionalTensor& cx, const Tensor& input_weight, const Tensor& weight,
                               const OptionalTensor& input_bias, const OptionalTensor& bias,
                               const OptionalTensor& lengths, const std::string& cell, bool is_reverse) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto gates = at::linear(input, input_weight, input_bias);
    auto made = call_layer(gates, hx, cx, weight, bias, lengths, cell, is_reverse);
    auto given = [](const OptionalTensor& t) { return t.value_or(Tensor()); };
    variable_list saved{input, hx, given(cx), input_weight, weight, given(input_bias), given(bias), given(lengths)};
    int64_t count = cx ? 2 : 1;  // states
    saved.insert(saved.end(), made.begin() + count, made.end());
    context->save_for_backward(saved);
    context->set_materialize_grads(false);
    context->saved_data["cell"] = cell;
    context->saved_data["is_reverse"] = is_reverse;
    variable_list results{made[count], made[0]};
    if (cx) results.push_back(made[1]);
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto saved = context->get_saved_variables();
    const auto &input = saved[0], &hx = saved[1], &cx = saved[2], &input_weight = saved[3], &weight = saved[4],
               &input_bias = saved[5], &bias = saved[6], &lengths = saved[7];
    const Cell& cell = cell_named(context->saved_data["cell"].toStringRef());
    bool is_reverse = context->saved_data["is_reverse"].toBool();
    grads.resize(3);
    variable_list found(10);
    if (std::ranges::none_of(grads, [](const Tensor& t) { return t.defined(); })) return found;
    std::vector<size_t> wanted;  // places of arguments
    for (size_t i = 0, edge = 0; i < 7; ++i) {
      if (saved[i].defined() && context->needs_input_grad(edge++)) wanted.push_back(i);
    }
    if (at::GradMode::is_enabled() || std::ranges::any_of(grads, is_transformed)) {
      bool is_differentiated = at::GradMode::is_enabled();
      at::AutoGradMode enabled(true);
      auto made = unrolled(input, hx, cx, input_weight, weight, input_bias, bias, lengths, cell, is_reverse);
      variable_list outputs, of_outputs, inputs;
      for (size_t i = 0; i < made.size(); ++i) {
        if (!grads[i].defined()) continue;
        outputs.push_back(made[i]);
        of_outputs.push_back(grads[i]);
      }
      for (size_t i : wanted) inputs.push_back(saved[i]);
      auto of_inputs = torch::autograd::grad(outputs, inputs, of_outputs, /*retain_graph=*/true, is_differentiated,
                                             /*allow_unused=*/true);
      for (size_t i = 0; i < wanted.size(); ++i) found[wanted[i]] = of_inputs[i];
      return found;
    }
    auto made = call_backward(optional(grads[0]), optional(grads[1]), optional(grads[2]), hx, optional(cx), weight,
                              optional(lengths), TensorList(saved).slice(8), bias.defined(), cell.name, is_reverse);
    size_t next = 0;
    auto of_gates = made[next++];
    found[1] = made[next++];
    if (cell.has_cells) found[2] = made[next++];
    found[4] = made[next++];
    if (bias.defined()) found[6] = made[next++];
    auto is_wanted = [&](size_t i) { return std::find(wanted.begin(), wanted.end(), i) != wanted.end(); };
    std::array<bool, 3> mask{is_wanted(0), is_wanted(3), is_wanted(5)};
    auto [of_input, of_input_weight, of_input_bias] = at::linear_backward(input, of_gates, input_weight, mask);
    if (mask[0]) found[0] = of_input;
    if (mask[1]) found[3] = of_input_weight;
    if (mask[2]) found[5] = of_input_bias;
    return found;
  }
};

// ---- packed sequences

// Whether these may be the numbers of samples that have each step of a packed sequence of so many elements.
bool are_batch_sizes(const Tensor& batch_sizes, int64_t elements) {
  if (!batch_sizes.is_cpu() || batch_sizes.dim() != 1 || batch_sizes.numel() == 0 ||
      batch_sizes.scalar_type() != at::kLong || !batch_sizes.is_contiguous()) {
    return false;
  }
  const int64_t *first = batch_sizes.const_data_ptr<int64_t>(), *end = first + batch_sizes.numel();
  return std::is_sorted(first, end, std::greater<>()) && end[-1] > 0 &&
         std::accumulate(first, end, int64_t{0}) == elements;
}

// Where the elements of a packed sequence are: the row of each among rows by steps, or by samples, and the element of
// each such row, -1 where there is none.
struct Places {
  Places(const Tensor& batch_sizes, int64_t steps, bool is_batch_first, c10::Device device) {
    const int64_t* sizes = batch_sizes.const_data_ptr<int64_t>();
    int64_t known = batch_sizes.numel(), batch = sizes[0];
    std::vector<int64_t> rows, elements(steps * batch, -1), lengths(batch, 0);
    for (int64_t step = 0; step < known; ++step) {
      for (int64_t sample = 0; sample < sizes[step]; ++sample) {
        int64_t row = is_batch_first ? sample * steps + step : step * batch + sample;
        elements[row] = static_cast<int64_t>(rows.size());
        rows.push_back(row);
        ++lengths[sample];
      }
    }
    auto on_device = [&](const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::kLong).to(device); };
    this->rows = on_device(rows);
    this->elements = on_device(elements);
    this->lengths = on_device(lengths);
  }

  Tensor rows, elements, lengths;
};

Tensor pack_rows(const Tensor& padded, const Tensor& rows, const Tensor& elements);
Tensor pad_rows(const Tensor& packed, const Tensor& rows, const Tensor& elements, const at::Scalar& value = 0);

struct PackRows : torch::autograd::Function<PackRows> {
  static Tensor forward(AutogradContext* context, const Tensor& padded, const Tensor& rows, const Tensor& elements) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({rows, elements});
    return padded.index_select(0, rows);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto saved = context->get_saved_variables();
    return {grads[0].defined() ? pad_rows(grads[0], saved[0], saved[1]) : Tensor(), {}, {}};
  }
};

Tensor filled(const Tensor& packed, const Tensor& elements, const at::Scalar& value) {
  auto is_empty = elements.lt(0);
  for (int64_t i = 1; i < packed.dim(); ++i) is_empty = is_empty.unsqueeze(-1);
  return packed.index_select(0, elements.clamp_min(0)).masked_fill(is_empty, value);
}

struct PadRows : torch::autograd::Function<PadRows> {
  static Tensor forward(AutogradContext* context, const Tensor& packed, const Tensor& rows, const Tensor& elements,
                        const at::Scalar& value) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({rows, elements});
    return filled(packed, elements, value);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    auto saved = context->get_saved_variables();
    return {grads[0].defined() ? pack_rows(grads[0], saved[0], saved[1]) : Tensor(), {}, {}, {}};
  }
};

// The rows that have an element, one after the other. Its gradient gathers too.
Tensor pack_rows(const Tensor& padded, const Tensor& rows, const Tensor& elements) {
  return is_transformed(padded) ? padded.index_select(0, rows) : PackRows::apply(padded, rows, elements);
}

// Rows of elements, and of `value` where there is none.
Tensor pad_rows(const Tensor& packed, const Tensor& rows, const Tensor& elements, const at::Scalar& value) {
  return is_transformed(packed) ? filled(packed, elements, value) : PadRows::apply(packed, rows, elements, value);
}

// ---- what PyTorch calls

bool is_plain(c10::DispatchKeySet keys, const Tensor& input) {
  return !keys.has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize})) &&
         !is_transformed(input);
}

bool is_dual(const Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }

struct Layers {
  const Cell& cell;
  TensorList states;  // of all layers and directions
  TensorList params;
  bool has_biases;
  int64_t count;
  double dropout;
  bool train;
  bool is_bidirectional;

  int64_t directions() const { return is_bidirectional ? 2 : 1; }
  int64_t params_each() const { return has_biases ? 4 : 2; }

  // PyTorch's own form serves what is left, and says what is wrong with it.
  bool are_served(c10::DispatchKeySet keys, const Tensor& input, int64_t batch) const {
    if (!is_plain(keys, input) || !at::globalContext().userEnabledCuDNN() || !at::isFloatingType(input.scalar_type()) ||
        input.numel() == 0 || batch == 0 || states.size() != (cell.has_cells ? 2 : 1) ||
        static_cast<int64_t>(params.size()) != count * directions() * params_each() || count < 1) {
      return false;
    }
    auto fits = [&](const Tensor& t, c10::IntArrayRef sizes) {
      return t.defined() && t.sizes() == sizes && t.device() == input.device() &&
             t.scalar_type() == input.scalar_type() && t.layout() == at::kStrided && !is_dual(t);
    };
    if (states[0].dim() != 3) return false;
    int64_t size = states[0].size(2), width = cell.gates * size;
    for (const auto& state : states) {
      if (!fits(state, {count * directions(), batch, size})) return false;
    }
    int64_t features = input.size(-1);
    for (int64_t i = 0; i < count * directions(); ++i) {
      auto each = params.slice(i * params_each(), params_each());
      int64_t taken = i < directions() ? features : size * directions();
      if (!fits(each[0], {width, taken}) || !fits(each[1], {width, size})) return false;
      if (has_biases && (!fits(each[2], {width}) || !fits(each[3], {width}))) return false;
    }
    return size > 0 && !is_dual(input);
  }

  // (steps, batch, features) to the last layer's outputs and the last states.
  std::tuple<Tensor, Tensor, Tensor> run(Tensor input, const OptionalTensor& lengths) const {
    bool is_autocast = at::autocast::is_autocast_enabled(c10::kPrivateUse1);
    auto cast = [&](const Tensor& t) {
      auto dtype = at::autocast::get_autocast_dtype(c10::kPrivateUse1);
      return is_autocast ? at::autocast::cached_cast(dtype, t, c10::kPrivateUse1) : t;
    };
    auto bias_of = [&](TensorList each, size_t i) { return has_biases ? OptionalTensor(cast(each[i])) : std::nullopt; };
    auto hx = cast(states[0]).unbind(0);
    std::vector<OptionalTensor> cx(hx.size());
    if (cell.has_cells) std::ranges::copy(cast(states[1]).unbind(0), cx.begin());
    std::vector<Tensor> hy, cy;
    input = cast(input);
    for (int64_t layer = 0; layer < count; ++layer) {
      std::vector<Tensor> outputs;
      for (int64_t direction = 0; direction < directions(); ++direction) {
        int64_t i = layer * directions() + direction;
        auto each = params.slice(i * params_each(), params_each());
        auto made = RnnLayer::apply(input, hx[i], cx[i], cast(each[0]), cast(each[1]), bias_of(each, 2),
                                    bias_of(each, 3), lengths, cell.name, direction == 1);
        outputs.push_back(made[0]);
        hy.push_back(made[1]);
        if (cell.has_cells) cy.push_back(made[2]);
      }
      input = is_bidirectional ? at::cat(outputs, -1) : outputs[0];
      if (dropout != 0 && train && layer + 1 < count) input = at::dropout(input, dropout, true);
    }
    return {input, at::stack(hy), cell.has_cells ? at::stack(cy) : Tensor()};
  }

  std::optional<std::tuple<Tensor, Tensor, Tensor>> run_padded(c10::DispatchKeySet keys, const Tensor& input,
                                                               bool is_batch_first) const {
    if (input.dim() != 3 || !are_served(keys, input, input.size(is_batch_first ? 0 : 1))) return std::nullopt;
    auto made = run(is_batch_first ? input.transpose(0, 1) : input, std::nullopt);
    if (is_batch_first) std::get<0>(made) = std::get<0>(made).transpose(0, 1);
    return made;
  }

  std::optional<std::tuple<Tensor, Tensor, Tensor>> run_packed(c10::DispatchKeySet keys, const Tensor& data,
                                                               const Tensor& batch_sizes) const {
    if (data.dim() != 2 || !are_batch_sizes(batch_sizes, data.size(0))) return std::nullopt;
    int64_t steps = batch_sizes.numel(), batch = batch_sizes.const_data_ptr<int64_t>()[0];
    if (!are_served(keys, data, batch)) return std::nullopt;
    Places places(batch_sizes, steps, false, data.device());
    auto padded = pad_rows(data, places.rows, places.elements).view({steps, batch, data.size(1)});
    auto made = run(padded, places.lengths);
    std::get<0>(made) = pack_rows(std::get<0>(made).flatten(0, 1), places.rows, places.elements);
    return made;
  }
};

std::tuple<Tensor, Tensor, Tensor> lstm(c10::DispatchKeySet keys, const Tensor& input, TensorList hx, TensorList params,
                                        bool has_biases, int64_t num_layers, double dropout, bool train,
                                        bool bidirectional, bool batch_first) {
  Layers layers{kLstm, hx, params, has_biases, num_layers, dropout, train, bidirectional};
  if (auto made = layers.run_padded(keys, input, batch_first)) return *made;
  return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}

std::tuple<Tensor, Tensor, Tensor> lstm_packed(c10::DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                               TensorList hx, TensorList params, bool has_biases, int64_t num_layers,
                                               double dropout, bool train, bool bidirectional) {
  Layers layers{kLstm, hx, params, has_biases, num_layers, dropout, train, bidirectional};
  if (auto made = layers.run_packed(keys, data, batch_sizes)) return *made;
  return at::native::lstm(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
}

using Padded = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, TensorList, bool, int64_t, double, bool,
                                              bool, bool);
using Packed = std::tuple<Tensor, Tensor> (*)(const Tensor&, const Tensor&, const Tensor&, TensorList, bool, int64_t,
                                              double, bool, bool);

template <const Cell& cell, Padded composite>
std::tuple<Tensor, Tensor> padded(c10::DispatchKeySet keys, const Tensor& input, const Tensor& hx, TensorList params,
                                  bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional,
                                  bool batch_first) {
  Layers layers{cell, hx, params, has_biases, num_layers, dropout, train, bidirectional};
  if (auto made = layers.run_padded(keys, input, batch_first)) return {std::get<0>(*made), std::get<1>(*made)};
  return composite(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}

template <const Cell& cell, Packed composite>
std::tuple<Tensor, Tensor> packed(c10::DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                  const Tensor& hx, TensorList params, bool has_biases, int64_t num_layers,
                                  double dropout, bool train, bool bidirectional) {
  Layers layers{cell, hx, params, has_biases, num_layers, dropout, train, bidirectional};
  if (auto made = layers.run_packed(keys, data, batch_sizes)) return {std::get<0>(*made), std::get<1>(*made)};
  return composite(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
}

std::tuple<Tensor, Tensor> pack_padded(const Tensor& input, const Tensor& lengths, bool batch_first) {
  if (input.dim() < 2 || input.numel() == 0) return at::native::_pack_padded_sequence(input, lengths, batch_first);
  int64_t steps = input.size(batch_first ? 1 : 0), batch = input.size(batch_first ? 0 : 1);
  // On the host, for what PyTorch says to lengths that do not fit.
  auto shown = at::empty({steps, batch}, at::kBool);
  auto batch_sizes = std::get<1>(at::native::_pack_padded_sequence(shown, lengths, false));
  if (batch_sizes.numel() > steps) return at::native::_pack_padded_sequence(input, lengths, batch_first);
  Places places(batch_sizes, steps, batch_first, input.device());
  return {input.flatten(0, 1).index_select(0, places.rows), batch_sizes};
}

Tensor pack_padded_backward(c10::DispatchKeySet keys, const Tensor& grad, c10::SymIntArrayRef sizes,
                            const Tensor& batch_sizes, bool batch_first) {
  if (!is_plain(keys, grad) || grad.numel() == 0 || is_dual(grad) || !are_batch_sizes(batch_sizes, grad.size(0)) ||
      batch_sizes.numel() > sizes[batch_first ? 1 : 0]) {
    return at::native::_pack_padded_sequence_backward_symint(grad, sizes, batch_sizes, batch_first);
  }
  Places places(batch_sizes, sizes[batch_first ? 1 : 0].expect_int(), batch_first, grad.device());
  return pad_rows(grad, places.rows, places.elements).view_symint(sizes);
}

std::tuple<Tensor, Tensor> pad_packed(c10::DispatchKeySet keys, const Tensor& data, const Tensor& batch_sizes,
                                      bool batch_first, const at::Scalar& padding_value, int64_t total_length) {
  if (!is_plain(keys, data) || data.dim() < 1 || data.numel() == 0 || is_dual(data) ||
      !are_batch_sizes(batch_sizes, data.size(0)) || (total_length > 0 && total_length < batch_sizes.numel())) {
    return at::native::_pad_packed_sequence(data, batch_sizes, batch_first, padding_value, total_length);
  }
  int64_t known = batch_sizes.numel(), steps = total_length > 0 ? total_length : known;
  Places places(batch_sizes, steps, batch_first, data.device());
  int64_t batch = batch_sizes.const_data_ptr<int64_t>()[0];
  auto sizes = data.sizes().vec();
  sizes[0] = batch_first ? batch : steps;
  sizes.insert(sizes.begin() + 1, batch_first ? steps : batch);
  auto lengths = at::empty({batch}, at::kLong);
  int64_t* length = lengths.mutable_data_ptr<int64_t>();
  const int64_t* at_step = batch_sizes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < batch; ++i) {
    length[i] = std::count_if(at_step, at_step + known, [i](int64_t size) { return size > i; });
  }
  return {pad_rows(data, places.rows, places.elements, padding_value).view(sizes), lengths};
}

template <typename Library>
void serve(Library& m) {
  m.impl("lstm.input", &lstm);
  m.impl("lstm.data", &lstm_packed);
  m.impl("gru.input", &padded<kGru, &at::native::gru>);
  m.impl("gru.data", &packed<kGru, &at::native::gru>);
  m.impl("rnn_tanh.input", &padded<kTanh, &at::native::rnn_tanh>);
  m.impl("rnn_tanh.data", &packed<kTanh, &at::native::rnn_tanh>);
  m.impl("rnn_relu.input", &padded<kRelu, &at::native::rnn_relu>);
  m.impl("rnn_relu.data", &packed<kRelu, &at::native::rnn_relu>);
  m.impl("_pack_padded_sequence_backward", &pack_padded_backward);
  m.impl("_pad_packed_sequence", &pad_packed);
}

TORCH_LIBRARY_FRAGMENT(torchtpu, m) {
  m.def(
      "rnn_layer(Tensor gates, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias, Tensor? lengths, str cell, "
      "bool reverse) -> Tensor[]");
  m.def(
      "rnn_layer_backward(Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor hx, Tensor? cx, Tensor weight, "
      "Tensor? lengths, Tensor[] saved, bool has_bias, str cell, bool reverse) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { serve(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  serve(m);
  m.impl("_pack_padded_sequence", &pack_padded);
}

}  // namespace
}  // namespace torchtpu
