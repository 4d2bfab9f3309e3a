"""Rules of neural networks' own ops: in comes a call of a traced graph, out goes what becomes of it when padded."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from torchtpu.compile.bucket_dims import Call, Dims, Plan, Unsafe, any_ragged, is_ragged, is_tensor, results, simple


def sums_rows(*masked: str) -> Callable[[Call], Plan]:
    """Backward ops that give back a gradient per row and sums over all rows: the surplus counts as zero."""

    def rule(call: Call) -> Plan:
        node = call.node
        rows = call.dims(masked[1])
        made: list[Dims | None] = []
        for i, value in enumerate(node.meta["val"]):
            if value is None:
                made.append(None)
            else:
                shape = call.shape(i)
                is_row = any(getattr(size, "free_symbols", ()) for size in shape)
                made.append(rows if is_row else tuple(map(simple, shape)))
        return Plan(made, {name: 0 for name in masked if isinstance(call.arguments.get(name), Node)})

    return rule


def layer_norm(call: Call) -> Plan:
    dims = call.dims("input")
    count = len(call.arguments["normalized_shape"])
    if any_ragged(dims[len(dims) - count :]):
        raise Unsafe("normalises a size that changes")
    rows = (*dims[: len(dims) - count], *((),) * count)
    return Plan([dims, rows, rows][: len(results(call.node))])


def by_sample(name: str) -> Callable[[Call], Plan]:
    """Ops on images: each sample of the first dimension for itself."""

    def rule(call: Call) -> Plan:
        dims = call.dims(name)
        for other in map(call.dims, call.tensors()):
            if any_ragged(other) and (other[0] != dims[0] or any_ragged(other[1:])):
                raise Unsafe("an image size that changes")
        count = len(results(call.node))
        shapes = [call.shape(i if isinstance(call.node.meta["val"], (list, tuple)) else None) for i in range(count)]
        return Plan([(dims[0], *map(simple, shape[1:])) for shape in shapes])

    return rule


def embedding(call: Call) -> Plan:
    weight = call.dims("weight")
    if any_ragged(weight):
        raise Unsafe("a table that changes")
    return Plan([(*call.dims("indices"), weight[1])], {"indices": 0})


def embedding_backward(call: Call) -> Plan:
    if call.arguments["scale_grad_by_freq"]:
        raise Unsafe("counts the indices")
    return Plan([tuple(map(simple, call.shape()))], {"grad_output": 0, "indices": 0})


def nll(call: Call) -> Plan:
    dims = call.dims("self")
    if len(dims) != 2 or is_ragged(dims[1]):
        raise Unsafe("classes that change")
    if call.arguments.get("weight") is not None:
        raise Unsafe("weights of classes")
    ignored = call.arguments.get("ignore_index", -100)
    if "grad_output" in call.arguments:
        return Plan([dims], {"target": ignored})
    rows = call.dims("target") if call.arguments.get("reduction", 1) == 0 else ()
    return Plan([rows, ()], {"target": ignored, "self": 0})


def attention(call: Call) -> Plan:
    query, key, value = (call.dims(name) for name in ("query", "key", "value"))
    if call.arguments.get("dropout_p", 0.0) != 0.0 or len(query) != 4:
        raise Unsafe("attention with dropout")
    if query[3] != key[3] or key[2] != value[2] or is_ragged(query[3]) or is_ragged(query[1]):
        raise Unsafe("heads that change")
    is_changing = is_ragged(key[2])
    if is_changing and call.arguments.get("is_causal") and query[2] != key[2]:
        raise Unsafe("a causal mask between sizes that differ")
    masks: dict[str, float] = {"query": 0, "key": 0, "value": 0}
    dims: list[Dims | None] = [(*query[:3], value[3]), query[:3], None, None, None, None, (), (), None]
    return Plan(dims, masks, hides_keys=is_changing and not call.arguments.get("is_causal"))


def attention_backward(call: Call) -> Plan:
    query, key, value = (call.dims(name) for name in ("query", "key", "value"))
    is_changing = is_ragged(key[2])
    hides = is_changing and not call.arguments.get("is_causal")
    bias = call.arguments.get("attn_bias")
    if isinstance(bias, Node) and is_tensor(bias) and call.arguments["grad_input_mask"][3]:
        raise Unsafe("a bias with a gradient")
    masks: dict[str, float] = dict.fromkeys(("grad_out", "query", "key", "value", "out", "logsumexp"), 0)
    return Plan([query, key, value, None], masks, hides_keys=hides)
