"""What programs cost whose op streams differ from lap to lap, cold and warm, beside torch CPU.

A process per program and column; CPU seconds of all laps, and of processes that compile for them, CPU milliseconds of
the median lap of the last quarter, and programs compiled in all and in that quarter. `warm` is a second process on the
cache of the first. Where a program has an optimizer, 1.1 s of torch CPU's column are the import of torch._dynamo, which
PyTorch's optimizers ask for where the device is not installed. On a GPU all times are wall time, and the peer is torch
CUDA.

    python benchmarks/unseen.py                     # all
    python benchmarks/unseen.py lists tree --laps 20
    python benchmarks/unseen.py --platform gpu
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
import torch.nn.functional as F
from torch import nn

Lap = Callable[[int], Any]


def lists(device: str) -> Lap:
    """A list that grows by an element a lap and is cloned each time, as list states of metrics are."""
    kept: list[torch.Tensor] = []

    def lap(i: int) -> None:
        kept.append(torch.full((8,), float(i), device=device))
        kept[:] = [k.clone() for k in kept]
        kept[-1].sum().item()

    return lap


def scatter(device: str) -> Lap:
    """Rows that are added one by one: a stream of equal ops, longer from lap to lap."""
    e, source = torch.zeros(100, 16, device=device), torch.ones(400, 16, device=device)
    places = torch.randint(100, (400,), generator=torch.Generator().manual_seed(0)).to(device)

    def lap(i: int) -> None:
        for k in range(20 + 7 * i):
            e[places[k]] += source[k]
        e.sum().item()

    return lap


def episode(device: str) -> Lap:
    """REINFORCE: an episode of another length each lap, an action read each step, then one backward over all."""
    rng = random.Random(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    def lap(i: int) -> None:
        chosen = []
        for _ in range(rng.randint(8, 40)):
            probabilities = torch.softmax(net(torch.rand(4).to(device)), -1)
            action = int(probabilities.argmax().item())
            chosen.append(torch.log(probabilities[action]))
        returns = torch.linspace(1, 0, len(chosen)).to(device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = torch.stack([-c * r for c, r in zip(chosen, returns, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return lap


def solver(device: str) -> Lap:
    """An adaptive solver: steps of a size that hangs on an error that is read."""
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device) * 0.3
    field = lambda y: torch.tanh(y @ weight)

    def lap(i: int) -> None:
        y, t, h = torch.linspace(-1, 1, 8, device=device) * (1 + i % 3), 0.0, 0.2
        while t < 1:
            k1 = field(y)
            k2 = field(y + h * k1)
            error = (h * (k2 - k1)).abs().max().item()
            if error < 0.05:
                y, t = y + h / 2 * (k1 + k2), t + h
            h *= 0.9 if error >= 0.05 else 1.1
        y.sum().item()

    return lap


def batches(device: str) -> Lap:
    """Training on graphs of new sizes: linear layers and layer norm, plain SGD."""
    rng = random.Random(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def lap(i: int) -> None:
        x = torch.rand(rng.randint(40, 400), 16).to(device)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return lap


def _layer(device: str) -> tuple[nn.Module, ...]:
    torch.manual_seed(0)
    made = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 32), nn.Linear(32, 64)
    return tuple(m.to(device) for m in made)


def noread(device: str) -> Lap:
    """Tokens that are generated without a read between them, as many as the lap says."""
    embedding, qkv, out, head = _layer(device)

    def lap(i: int) -> None:
        tokens = torch.zeros(1, 4, dtype=torch.long, device=device)
        with torch.no_grad():
            for _ in range(12 + i % 9):
                x = embedding(tokens)
                q, k, v = qkv(x).chunk(3, -1)
                x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
                tokens = torch.cat([tokens, head(x[:, -1]).argmax(-1, keepdim=True)], 1)
        tokens.tolist()

    return lap


def decode(device: str) -> Lap:
    """A token a lap, with a cache of keys and values that grows by `cat`."""
    embedding, qkv, out, head = _layer(device)
    state: dict[str, torch.Tensor] = {"token": torch.zeros(1, 1, dtype=torch.long, device=device)}

    def lap(i: int) -> None:
        with torch.no_grad():
            x = embedding(state["token"])
            q, k, v = qkv(x).chunk(3, -1)
            for name, new in (("k", k), ("v", v)):
                state[name] = torch.cat([state[name], new], 1) if name in state else new
            x = x + out(F.scaled_dot_product_attention(q, state["k"], state["v"]))
            state["token"] = head(x[:, -1]).argmax(-1, keepdim=True)
        state["token"].item()

    return lap


def lbfgs(device: str) -> Lap:
    """L-BFGS in double precision, whose line search branches on what it reads."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device)
    x = torch.randn(64, 4, dtype=torch.double).to(device)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    return lambda i: optimizer.step(closure).item()


def tree(device: str) -> Lap:
    """A recursion over a tree that is another one for each sample."""
    rng = random.Random(0)
    torch.manual_seed(0)
    join, leaf = nn.Linear(32, 16).to(device), nn.Embedding(10, 16).to(device)
    words = torch.arange(10, device=device)

    def value(depth: int) -> torch.Tensor:
        if depth == 0 or rng.random() < 0.3:
            return leaf(words[rng.randrange(10)])
        return torch.tanh(join(torch.cat([value(depth - 1), value(depth - 1)])))

    def lap(i: int) -> None:
        with torch.no_grad():
            value(4).sum().item()

    return lap


def _training(net: nn.Module, batch: Callable[[], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]) -> Lap:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def lap(i: int) -> None:
        optimizer.zero_grad()
        found = loss(net(batch()))
        found.backward()
        optimizer.step()
        found.item()

    return lap


def gpt(device: str) -> Lap:
    """A transformer of two layers in training: a fixed body."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    net = nn.Sequential(nn.Embedding(64, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 64)).to(device)
    tokens = torch.randint(64, (4, 32)).to(device)
    return _training(net, lambda: tokens, lambda y: F.cross_entropy(y.flatten(0, 1), tokens.flatten()))


def cnn(device: str) -> Lap:
    """A convolutional network in training: a fixed body."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    x, y = torch.rand(16, 3, 16, 16).to(device), torch.randint(10, (16,)).to(device)
    return _training(net, lambda: x, lambda found: F.cross_entropy(found, y))


def mlp(device: str) -> Lap:
    """A network trained on batches of 20 to 90 rows with Adam."""
    rng = random.Random(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).to(device)
    return _training(net, lambda: torch.rand(rng.randint(20, 90), 16).to(device), lambda y: y.square().mean())


class _UNet(nn.Module):
    """One level down and up again, to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x).relu()
        up = F.interpolate(self.up(self.down(entered).relu()), size=x.shape[2:])
        return self.leave(torch.cat([entered, up], 1))


def images(device: str) -> Lap:
    """A small U-Net trained on images of ever other sizes."""
    rng = random.Random(0)
    torch.manual_seed(0)
    sizes = lambda: (2, 1, rng.randint(16, 40), rng.randint(16, 40))
    return _training(_UNet().to(device), lambda: torch.randn(sizes()).to(device), lambda y: y.square().mean())


def signals(device: str) -> Lap:
    """Strided convolutions trained on signals of ever other lengths."""
    rng = random.Random(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv1d(1, 8, 11, 4, 5), nn.BatchNorm1d(8), nn.ReLU()]
    layers += [nn.Conv1d(8, 16, 5, 2, 2), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 16, 3, 1, 1)]
    net = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 10)).to(device)
    return _training(net, lambda: torch.randn(4, 1, rng.randint(800, 2400)).to(device), lambda y: y.square().mean())


def tokens(device: str) -> Lap:
    """A transformer of two layers trained on padded batches of ever other shapes."""
    rng = random.Random(0)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    net = nn.ModuleList([nn.Embedding(50, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)]).to(device)
    optimizer = torch.optim.AdamW(net.parameters())

    def lap(i: int) -> None:
        sentences = [torch.randint(1, 50, (rng.randint(3, 20),)) for _ in range(rng.randint(2, 8))]
        x = nn.utils.rnn.pad_sequence(sentences, batch_first=True).to(device)
        y, pad = torch.randint(0, 5, x.shape).to(device), x == 0
        embedding, encoder, head = net
        found = F.cross_entropy(head(encoder(embedding(x), src_key_padding_mask=pad))[~pad], y[~pad])
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        found.item()

    return lap


def sequences(device: str) -> Lap:
    """An LSTM of two layers, both ways, trained on packed sequences of ever other lengths."""
    rng = random.Random(0)
    torch.manual_seed(0)
    embedding, head = nn.Embedding(100, 32).to(device), nn.Linear(128, 5).to(device)
    recurrent = nn.LSTM(32, 64, 2, bidirectional=True, batch_first=True).to(device)
    optimizer = torch.optim.Adam([*embedding.parameters(), *recurrent.parameters(), *head.parameters()])

    def lap(i: int) -> None:
        lengths = [rng.randint(5, 40) for _ in range(8)]
        x, y = torch.randint(0, 100, (8, max(lengths))).to(device), torch.randint(0, 5, (8,)).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(
            embedding(x), torch.tensor(lengths), batch_first=True, enforce_sorted=False
        )
        made, (last, _) = recurrent(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(made, batch_first=True)
        found = F.cross_entropy(head(padded.mean(1) + torch.cat([last[-2], last[-1]], 1)), y)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        found.item()

    return lap


def translator(device: str) -> Lap:
    """A GRU that reads sentences of ever other lengths, and one that writes others, called step by step."""
    rng = random.Random(0)
    torch.manual_seed(0)
    read, written, head = nn.Embedding(50, 32).to(device), nn.Embedding(50, 32).to(device), nn.Linear(32, 50).to(device)
    encoder, decoder = (nn.GRU(32, 32, batch_first=True).to(device) for _ in range(2))
    parts = nn.ModuleList([read, written, head, encoder, decoder])
    optimizer = torch.optim.SGD(parts.parameters(), 0.01)

    def lap(i: int) -> None:
        x, y = (torch.randint(0, 50, (1, rng.randint(3, 10))).to(device) for _ in range(2))
        token, found = torch.zeros(1, 1, dtype=torch.long, device=device), torch.zeros((), device=device)
        _, state = encoder(read(x))
        for step in range(y.shape[1]):
            made, state = decoder(F.relu(written(token)), state)
            found = found + F.cross_entropy(head(made[:, -1]), y[:, step])
            token = y[:, step : step + 1]
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        found.item()

    return lap


def expressions(device: str) -> Lap:
    """Random expressions of a vector, as symbolic regression tries them: any op follows any other."""
    rng = random.Random(0)
    x = torch.linspace(-2, 2, 50).to(device)
    ones = torch.sin, torch.cos, torch.tanh, torch.abs, torch.exp, torch.square
    pairs = torch.add, torch.sub, torch.mul, torch.maximum

    def value(depth: int) -> torch.Tensor:
        kind = rng.random()
        if depth == 0 or kind < 0.2:
            return x if rng.random() < 0.6 else torch.full_like(x, rng.uniform(-1, 1))
        if kind < 0.5:
            return rng.choice(ones)(value(depth - 1))
        return rng.choice(pairs)(value(depth - 1), value(depth - 1))

    def lap(i: int) -> None:
        (value(4) - x**3).square().mean().item()

    return lap


def replay(device: str) -> Lap:
    """Q-learning from a buffer on the device that fills: the bound of what is sampled grows."""
    rows = torch.zeros(2000, 8, device=device)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def lap(i: int) -> None:
        rows[i] = torch.rand(8).to(device)
        chosen = rows[torch.randint(0, i + 1, (32,), device=device)]
        loss = (net(chosen).max(1).values - chosen[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return lap


def experts(device: str) -> Lap:
    """A mixture of experts, each of which takes the tokens that have chosen it, of batches of ever other sizes."""
    rng = random.Random(0)
    gate = nn.Linear(16, 3).to(device)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).to(device)
    optimizer = torch.optim.SGD([*gate.parameters(), *layers.parameters()], 0.01)

    def lap(i: int) -> None:
        x = torch.randn(rng.randint(16, 60), 16).to(device)
        weights, chosen = gate(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        for expert, layer in enumerate(layers):
            rank, token = torch.where(mask[expert])
            found.index_add_(0, token, layer(x[token]) * weights[token, rank, None])
        optimizer.zero_grad()
        loss = (found - x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return lap


def tables(device: str) -> Lap:
    """A grid of features in tables, looked up at places that are hashed: four tables, four rows of each for a point."""
    rows = torch.randn(4, 512, 2).to(device).requires_grad_()

    def lap(i: int) -> None:
        x, found = torch.rand(64, 2).to(device), []
        for level in range(4):
            at = x * int(4 * 1.7**level)
            corner, value = at.floor().long(), 0.0
            for shift in range(4):
                place = corner + shift
                key = (place[:, 0] ^ (place[:, 1] * 2654435761)) % 512
                value = value + rows[level][key] * (at - corner)[:, :1]
            found.append(value)
        (gradient,) = torch.autograd.grad(torch.cat(found, 1).square().sum(), rows)
        gradient.sum().item()

    return lap


PROGRAMS: dict[str, Callable[[str], Lap]] = {
    each.__name__: each
    for each in (
        lists,
        scatter,
        episode,
        solver,
        batches,
        noread,
        lbfgs,
        tree,
        gpt,
        cnn,
        decode,
        mlp,
        images,
        signals,
        tokens,
        sequences,
        translator,
        expressions,
        replay,
        experts,
        tables,
    )
}
NOT_SUMMED = ("images", "signals", "tokens", "sequences", "translator", "expressions", "replay", "experts", "tables")


def _cpu_time() -> float:
    """Seconds of this process and of those it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(device: str, program: str, laps: int, *, is_timed_by_wall: bool) -> dict[str, float]:
    """What so many laps cost this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    late, taken, counts = laps - laps // 4, [], []
    if device == "tpu":
        import torchtpu

        compiled = lambda: int(torchtpu.metrics.snapshot()["programs_compiled"])
    else:
        compiled = lambda: 0
    torch.zeros(1, device=device).add(1).item()
    clock = time.perf_counter if is_timed_by_wall else _cpu_time
    begun, lap = clock(), PROGRAMS[program](device)
    for i in range(laps):
        started = clock()
        lap(i)
        taken.append(clock() - started)
        counts.append(compiled())
    if device != "cpu":
        getattr(torch, device).synchronize()
    return {
        "seconds": clock() - begun,
        "lap_ms": statistics.median(taken[late:]) * 1e3,
        "compiled": counts[-1],
        "late": counts[-1] - counts[late - 1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS])
    parser.add_argument("--laps", type=int, default=40)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    is_gpu = options.platform == "gpu"
    if options.worker:
        print(json.dumps(measure(options.worker, options.programs[0], options.laps, is_timed_by_wall=is_gpu)))
        return
    peer, name = ("cuda", "torch CUDA") if is_gpu else ("cpu", "torch CPU")
    heads = ["program", f"{name}, ms a lap", f"{name}, s", "cold, s", "ms a late lap", "compiled, late", "warm, s"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    sums = {name: 0.0, "cold": 0.0, "warm": 0.0}
    for program in options.programs or PROGRAMS:
        with tempfile.TemporaryDirectory() as cache:
            words = program, "--laps", str(options.laps), "--platform", options.platform
            environment = {"TORCHTPU_CACHE_DIR": cache, **(peers.ON_GPU if is_gpu else {})}
            torchs, cold, warm = (
                peers.run_worker(__file__, device, *words, **environment) for device in (peer, "tpu", "tpu")
            )
        for column, found in zip(sums, (torchs, cold, warm), strict=True):
            sums[column] += 0.0 if program in NOT_SUMMED else found["seconds"]
        took = f"{torchs['lap_ms']:.2f} | {torchs['seconds']:.1f}"
        row = f"| {program} | {took} | {cold['seconds']:.1f} | {cold['lap_ms']:.1f}"
        print(f"{row} | {cold['compiled']}, {cold['late']} | {warm['seconds']:.1f} |", flush=True)
    added = ", ".join(f"{column} {seconds:.1f} s" for column, seconds in sums.items())
    print(f"sums without {', '.join(NOT_SUMMED)}: {added}")


if __name__ == "__main__":
    main()
