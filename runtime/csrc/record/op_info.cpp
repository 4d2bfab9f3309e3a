// What the recorder needs to know of an op, from its schema and its row of the table of lowerings.

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <bit>

#include "record/trie.h"

namespace torchtpu {

namespace {

c10::TypePtr element_type(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type;
}

ArgInfo describe_arg(const c10::Argument& arg, const OpFacts& facts) {
  ArgInfo info;
  info.is_written = arg.alias_info() && arg.alias_info()->isWrite();
  info.is_out = info.is_written && arg.is_out();
  for (const auto& name : facts.mutates) info.is_written |= name == arg.name();
  auto type = element_type(arg.real_type());
  if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType:
      info.role = ArgRole::kDtype;
      break;
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::MemoryFormatType:
      info.role = ArgRole::kPlacement;
      break;
    default:
      info.role = arg.name() == "pin_memory" || arg.name() == "non_blocking" ? ArgRole::kPlacement : ArgRole::kPlain;
  }
  info.is_number = type->kind() == c10::TypeKind::NumberType;
  info.is_element = info.is_number && (arg.name() == "value" || arg.name() == "fill_value");
  info.is_liftable = info.is_number || type->kind() == c10::TypeKind::FloatType ||
                     type->kind() == c10::TypeKind::TensorType ||
                     std::find(facts.ints.begin(), facts.ints.end(), arg.name()) != facts.ints.end();
  for (const auto& [name, values] : facts.structural) {
    if (name != arg.name()) continue;
    if (values) {
      info.structural = *values;
    } else {
      info.is_structural = true;
    }
  }
  return info;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& handle, const OpFacts& facts)
    : handle(handle),
      lifts(facts.lifts),
      random(facts.random),
      has_infer(facts.has_infer),
      multiplies(facts.multiplies),
      runs_once(facts.runs_once),
      elementwise(facts.elementwise) {
  const auto& schema = handle.schema();
  name = schema.name().starts_with("aten::") ? schema.name().substr(6) : schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  for (const auto& arg : schema.arguments()) {
    auto type = element_type(arg.real_type());
    if (type->kind() == c10::TypeKind::GeneratorType) generator_arg = static_cast<int>(args.size());
    if (type->kind() == c10::TypeKind::DeviceObjType) device_arg = static_cast<int>(args.size());
    if (auto list = type->cast<c10::ListType>()) {
      has_optional_list |= list->getElementType()->kind() == c10::TypeKind::OptionalType;
    }
    args.push_back(describe_arg(arg, facts));
    may_resize |= args.back().is_out;
  }
  random |= generator_arg >= 0;
  is_foreach = name.rfind("_foreach_", 0) == 0;
  for (const auto& ret : schema.returns()) {
    int alias = -1;
    if (ret.alias_info()) {
      for (size_t i = 0; i < args.size(); i++) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info && *info == *ret.alias_info()) alias = static_cast<int>(i);
      }
    }
    return_alias.push_back(alias);
  }
}

double as_double(const NumberKey& key) {
  return key.kind == NumberKey::kDouble ? std::bit_cast<double>(key.bits) : static_cast<double>(key.bits);
}

bool is_structural(const ArgInfo& arg, const NumberKey& key) {
  if (arg.is_structural || key.kind == NumberKey::kBool || key.kind == NumberKey::kComplex) return true;
  double value = as_double(key);
  return std::find(arg.structural.begin(), arg.structural.end(), value) != arg.structural.end();
}

}  // namespace torchtpu
