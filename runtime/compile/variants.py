"""Builds the variants of a region's program: pieces, clusters, whole, and other compile options.

Unusual are what is compiled with the options of the first tier, a region of clusters as one program, "whole", and what
is compiled with the options of a variant. Which variant was the fastest is kept in the store: the next process starts
with it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, cast

import torch

from torchtpu.compiler_cache import Key, Store
from torchtpu.runtime.device.client import Options
from torchtpu.runtime.device.loaded import About, Loaded, Tier
from torchtpu.runtime.execute.autotuner import FIRST, Autotuner, Config
from torchtpu.runtime.execute.executable import Executable
from torchtpu.runtime.execute.sequence import Sequence as Parts
from torchtpu.runtime.ir.checked import items, parsed, text
from torchtpu.runtime.ir.program import Program
from torchtpu.runtime.padding.layout import PaddedForm
from torchtpu.runtime.partition.clusters import MS_A_LAUNCH, Clusters
from torchtpu.runtime.partition.pieces import Piece
from torchtpu.runtime.telemetry import log
from torchtpu.runtime.telemetry.counters import Counters

from .builder import Build, Builder
from .compiler import Compiler, NotCompiledError
from .failing import failing
from .plan_cache import Plan, Plans
from .stock import PieceLayouts, Stock
from .tiers import FirstTier, Sweep

_WHOLE = "whole"
_FEW_CORES = 2
_IDLE_SECONDS, _IDLE_SHARE = 1.0, 0.1  # a process that computes no more than this for so long is idle
_OFTEN_ASKED = 16  # times as often are launches counted that others wait for
_MOST_SHARE = 0.05  # of the process's CPU time that candidates take


class NotBuiltError(RuntimeError):
    """A variant is not compiled, because of a program that `about` describes; the cause is why."""

    def __init__(self, about: About, cause: BaseException) -> None:
        super().__init__(f"the region recorded at {about.line} ({about.ops} ops) is not compiled: {cause}")
        self.about = about
        self.__cause__ = cause


class SpareTime:
    """The time in which candidates are compiled, which no launch needs: at most a twentieth of what the process
    computes and, with few cores, where it has not computed for a while."""

    def __init__(self, cores: int) -> None:
        self._needs_idleness = cores <= _FEW_CORES
        self._spent_ms = 0.0
        self._looked_at = time.monotonic(), time.process_time()
        self._idle_until = 0.0
        self._lock = threading.Lock()

    def has_room_for(self, milliseconds: float) -> bool:
        """Whether so long a compile may begin now."""
        now, computed = time.monotonic(), time.process_time()
        with self._lock:
            before, computed_before = self._looked_at
            if now - before >= _IDLE_SECONDS:
                self._looked_at = now, computed
                if computed - computed_before <= _IDLE_SHARE * (now - before):
                    self._idle_until = now + _IDLE_SECONDS
            is_allowed = (self._spent_ms + milliseconds) <= _MOST_SHARE * computed * 1e3
            return is_allowed and (now < self._idle_until or not self._needs_idleness)

    def spend(self, milliseconds: float) -> None:
        """A candidate was compiled."""
        with self._lock:
            self._spent_ms += milliseconds


class Losses:
    """What the launches of regions in pieces have lost, which differ in sizes alone."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self._lock = threading.Lock()

    def add(self, milliseconds: float) -> None:
        """They have lost so much more."""
        with self._lock:
            self.milliseconds += milliseconds


class Postponed(NamedTuple):
    """A region's padded form, which `make` begins to make: it is of use to all regions whose `losses` these are."""

    make: Callable[[], Future[Any]]
    losses: Losses


class VariantBuilder:
    """What the variants of all regions are made with. `sweep` is what to try on this platform, `first` is how new
    programs are compiled there, None where there is nothing; `deterministic` are the options of programs that may not
    depend on chance; `planned` hears of new pieces of regions that are not looked at as a whole; options that could not
    be compiled once are `refused` from then on."""

    def __init__(
        self,
        builder: Builder,
        plans: Plans,
        compiler: Compiler,
        store: Store,
        counters: Counters,
        knob: Callable[[str], Any],
        sweep: Sweep | None,
        first: FirstTier | None,
        deterministic: Options,
        capacity: Callable[[], int],
        layouts: PieceLayouts,
        planned: Callable[[Program], Any],
    ) -> None:
        self.builder = builder
        self.plans = plans
        self.compiler = compiler
        self.store = store
        self.counters = counters
        self.knob = knob
        self.sweep = sweep
        self.first = first
        self.deterministic = deterministic
        self.stock = Stock(builder, plans, compiler, first, capacity, layouts)
        self.planned = planned
        self.refused: set[str] = set()
        self.spare_time = SpareTime(len(os.sched_getaffinity(0)))

    def known_pieces(self, program: Program, device: int, regions: int, *, is_loop: bool) -> list[Piece]:
        """The pieces of a region that is not looked at as a whole: new regions keep ending on its line, where so many
        have ended, and it is made of what others were made of, for the most part. None where that is not so, or where
        it is laps of a loop, which may have a program already."""
        first, visits, is_forced = self.first_tier(), self.stock.visit(program.line), self.knob("tiers") == "pieces"
        self.stock.note_regions(program.line, regions)
        is_often_new = first is not None and self._is_often_new(first, program.line, visits)
        if first is None or not (is_often_new or is_forced) or (is_loop and not is_forced):
            return []
        if not first.may_divide(program, is_often_new=True):
            return []
        pieces = self.stock.divide(program, is_often_new=is_often_new)
        new = self.stock.new_among(pieces)
        is_known = sum(p.num_ops for p in new) <= first.most_missing * sum(p.num_ops for p in pieces)
        is_worth_it = is_known and not first.is_paid_at_once(program)
        found = self._there(pieces, device) if not new or is_worth_it or is_forced else []
        if found:
            for piece in new:
                self.planned(piece.program)
        return found

    def losses(self, form: PaddedForm) -> Losses:
        """Those of regions that are made of pieces and may have this form."""
        if form.losses is None:
            form.losses = Losses()
        return cast(Losses, form.losses)

    def pieces_instead(
        self, program: Program, padded: Callable[[], list[Program]], device: int, regions: int
    ) -> list[Piece]:
        """The pieces of a region that came in other sizes before, where new regions keep ending on its line and all of
        these are there, while the programs of its `padded` form may not be; else none."""
        first = self.first_tier()
        if first is None or not self._is_often_new(first, program.line, self.stock.visits(program.line)):
            return []
        if not first.may_divide(program, is_often_new=True) or first.is_paid_at_once(program):
            return []
        pieces = self.stock.divide(program, is_often_new=True)
        new = self.stock.new_among(pieces)
        # A process before this one may have had them when it came here: this one is to compile no more than that.
        if new and not (all(map(self.stock.was_stored, new)) and self._is_absent(padded())):
            return []
        self.stock.visit(program.line)
        self.stock.note_regions(program.line, regions)
        return self._there(pieces, device)

    def _is_absent(self, programs: list[Program]) -> bool:
        """Whether some of these were in no region of this process, nor in one before it."""
        return bool(self.stock.new_undivided([(each, self.builder.find(each)) for each in programs])[1])

    def new_pieces(self, program: Program, usual: list[tuple[Program, Plan]], device: int) -> list[Piece]:
        """The pieces that a region new to the first tier is made of; none where it is better compiled as it is."""
        first, is_forced = self.first_tier(), self.knob("tiers") == "pieces"
        if first is None:
            return []
        is_often_new = self._is_often_new(first, program.line, self.stock.visits(program.line))
        if not first.may_divide(program, is_often_new=is_often_new or is_forced):
            return []
        undivided, absent = self.stock.new_undivided(usual)
        may_divide = absent or is_forced or (is_often_new and undivided)
        pieces = self.stock.divide(program, is_often_new=is_often_new) if may_divide else []
        # A piece that is the whole region is padded for its next sizes, also where a process before this one had it.
        is_whole = is_often_new and len(pieces) == 1
        if not (absent or is_forced or is_whole):
            pieces = []
        new = self.stock.new_among(pieces)
        if is_forced or self.knob("policy") == "frozen":
            is_worth_it = True
        elif is_often_new:  # in ops with lists taken apart, as pieces have them
            share = sum(len(each.ops) for each in absent) / len(program.ops)
            is_worth_it = is_whole or sum(p.num_ops for p in new) <= share * sum(p.num_ops for p in pieces)
        else:
            compiled, work = self.stock.compiled_among(new), first.work(len(each.ops) for each in absent)
            spent = self.stock.spent(program.line) if self.stock.keeps_being_new(program.line) else 0.0
            is_worth_it = first.is_divided((piece.num_ops for piece in compiled), work, spent)
            if not (pieces and is_worth_it):
                self.stock.spend(program.line, first.work(len(each.ops) for each in undivided))
        return self._there(pieces, device) if is_worth_it else []

    def _is_often_new(self, first: FirstTier, line: str, visits: int) -> bool:
        """Whether new regions keep ending on a line, where so many did."""
        return visits > first.most_visits and self.stock.keeps_being_new(line)

    def _there(self, pieces: list[Piece], device: int) -> list[Piece]:
        """The pieces, but for those that would have to be compiled where nothing may be."""
        is_there = self.knob("policy") != "frozen" or all(self.stock.has(piece, device) for piece in pieces)
        return pieces if is_there else []

    def first_tier(self) -> FirstTier | None:
        """How new regions are compiled to begin with; None where that has to be the usual way."""
        has_one = self.knob("tiers") == "off" or self.knob("policy") == "block" or self.is_deterministic()
        return None if has_one else self.first

    def is_deterministic(self) -> bool:
        """Whether the program that runs may not depend on what happened before."""
        return bool(self.knob("deterministic")) or torch.are_deterministic_algorithms_enabled()


class RegionVariants:
    """The variants of one region on one device; `clusters` are asked for when they are needed, `pieces` are what it
    begins with, where that is known, and `postponed` is the padded form that takes their place."""

    def __init__(
        self,
        builder: VariantBuilder,
        program: Program,
        clusters: Callable[[], Clusters | None],
        device: int,
        pieces: list[Piece],
        postponed: Postponed | None = None,
    ) -> None:
        self._builder = builder
        self._postponed = postponed
        self._lost_ms = 0.0  # that the postponed form has heard of
        self._program = program
        self._find_clusters = clusters
        self._device = device
        self._options = builder.sweep.options if builder.sweep and builder.knob("sweep") else {}
        self._first = None if builder.knob("tiers") == "off" else builder.first
        self._pieces = pieces
        self._loss_ms, self._text_bytes = self._loss_of(pieces), self._text_bytes_of(pieces)
        self._usual_bytes: list[int] = []  # of the texts of the usual variant, where they are written
        self._usual_plans: list[Plan] = []  # of that, where the region begins in the first tier and they are known
        self._compile_ms: dict[Config, float] = {}
        self._digests: dict[Config, list[str]] = {}  # of the programs of each variant
        self._tried = 0  # options
        self._key: Key | None = None  # of what is known of the variants

    @functools.cached_property
    def _clusters(self) -> Clusters | None:
        return self._find_clusters()

    @functools.cached_property
    def _untried(self) -> list[str]:
        return [*([_WHOLE] if self._clusters else []), *self._options]

    def start(self) -> Future[Any]:
        """What a plan is given: the variant that was the fastest, else the usual one or, where that would have to be
        compiled, the first tier's; others may replace it. Raises what lowering raises."""
        usual = [] if self._pieces else self._found(())
        config: Config = FIRST if self._pieces else ()
        found, untried = usual, [] if self._pieces else self._untried
        self._usual_bytes = [plan.text_bytes for _, plan in usual]
        with self._builder.counters.bailouts.attempt("variants", self._program.line):
            known = self._recalled([plan for _, plan in usual]) if usual else None
            if known is not None:
                found, config, untried = self._found(known) if _WHOLE in known else usual, known, []
            elif usual and self._begins_in_first_tier(usual):
                config = FIRST
                self._usual_plans = [plan for _, plan in usual]
                pieces = self._builder.new_pieces(self._program, usual, self._device)
                self._loss_ms, self._pieces = self._loss_of(pieces), pieces
                self._text_bytes = self._text_bytes_of(pieces)
                if not pieces:
                    self._builder.stock.keep_undivided(usual)
        if self._pieces:
            self._builder.counters.regions_in_pieces += 1
        ready: Future[Any] = Future()

        def give(config: Config, flight: Future[Any]) -> None:
            with failing(ready.set_exception):
                variant = flight.result()
                ready.set_result(Autotuner(self, config, variant, untried) if config or untried else variant)

        def give_instead(error: BaseException | None, flight: Future[Any]) -> None:
            with failing(ready.set_exception):
                if flight.exception() is None:  # else it was no matter of the variant
                    self._note(error)
                give((), flight)

        def give_first(flight: Future[Any]) -> None:
            with failing(ready.set_exception):
                if config and flight.exception() is not None:
                    instead = functools.partial(give_instead, flight.exception())
                    self._submitted((), usual or self._found(())).add_done_callback(instead)
                else:
                    give(config, flight)

        self._submitted(config, found).add_done_callback(give_first)
        return ready

    def _loss_of(self, pieces: list[Piece]) -> float:
        """How much longer a launch in the first tier, of these pieces if any, takes than with the usual options."""
        if self._first is None:
            return 0.0
        if not pieces:
            return self._first.loss_ms(self._program)
        return self._first.launch_us * 1e-3 * (len(pieces) - 1) + self._builder.stock.loss_ms(pieces)

    def _text_bytes_of(self, pieces: list[Piece]) -> int:
        """How long the usual variant's text is, at least, if what comes again among these pieces is compiled once."""
        return self._builder.stock.text_bytes(pieces) if self._first is not None else 0

    @functools.cached_property
    def _price_ms(self) -> float:
        """What the usual variant takes to compile, about."""
        if self._first is None:
            return 0.0
        lengths: list[float] = list(self._usual_bytes)
        if not lengths:  # its text is not written yet
            num_ops = sum({piece.identity: piece.num_ops for piece in self._pieces}.values())
            lengths = [self._text_bytes / max(1, num_ops) * len(program.ops) for program in self._programs(())]
        return sum(map(self._first.price_ms, lengths))

    # what the autotuner asks

    def make(self, config: Config, *, is_needed_now: bool) -> Future[Any]:
        builder = self._builder
        if config[-1:] == (_WHOLE,):
            builder.counters.regions_climbing += 1
        elif config and not is_needed_now:
            self._tried += 1
        made: Future[Any] = Future()
        if not builder.refused.isdisjoint(config):
            made.cancel()
            return made
        try:
            if self._postponed is not None:
                return self._begun(self._postponed)
            found = self._found(config)
            if not config and self._key is None:
                self._recalled([plan for _, plan in found])
            made = self._submitted(config, found, is_needed_now=is_needed_now)
        except Exception as error:  # noqa: BLE001 -- the variant in use serves as well
            made.set_exception(error)
        if config or not is_needed_now:  # else whoever needs the variant raises what failed
            made.add_done_callback(lambda made: self._refuse(config, made.exception()))
        return made

    def is_paid(self, launches: int) -> bool:
        if self._postponed is not None:
            lost_ms = launches * self._loss_ms
            self._postponed.losses.add(lost_ms - self._lost_ms)
            self._lost_ms = lost_ms
        return self._is_free() or (self.may_be_paid(launches) and self._lost_after(launches) >= self._price_ms)

    def _is_free(self) -> bool:
        """Whether the usual variant's programs are all there, for other regions."""
        plans, compiler = self._usual_plans, self._builder.compiler
        return bool(plans) and self._postponed is None and all(compiler.is_loaded(each, self._device) for each in plans)

    def may_be_paid(self, launches: int) -> bool:
        if self._is_free():
            return True
        least = self._first.price_ms(self._text_bytes) if self._first is not None else 0.0
        price = vars(self).get("_price_ms", least)  # a search for repeats may be needed to know
        return bool(self._lost_after(launches) >= price)

    def _lost_after(self, launches: int) -> float:
        """What so many launches lose; with those of the same form in other sizes, at most, which are to be heard of."""
        own = launches * self._loss_ms
        if self._postponed is None:
            return own
        return self._postponed.losses.milliseconds + _OFTEN_ASKED * (own - self._lost_ms)

    def _begun(self, postponed: Postponed) -> Future[Any]:
        """The postponed form; should it fail, there is none from then on."""

        def landed(made: Future[Any]) -> None:
            if made.cancelled() or made.exception() is not None:
                self._postponed = None

        try:
            made = postponed.make()
        except Exception:
            self._postponed = None
            raise
        made.add_done_callback(landed)
        return made

    def promoted(self) -> list[str]:
        self._builder.counters.regions_promoted += 1
        self._builder.compiler.forget(self._digests.pop(FIRST))  # nothing is launched in the first tier again
        if "cluster" in self._builder.knob("log"):
            log.write(f"tpu:{self._device} region at {self._program.line} is promoted")
        return self._untried if self._postponed is None else []

    def is_due(self, config: Config, launches: int, seconds: float) -> bool:
        sweep = self._builder.sweep
        if config[-1] == _WHOLE:
            is_due = self._clusters is not None and launches > self._clusters.hot
        elif sweep is None or not self._builder.knob("sweep"):
            return False
        else:
            is_due = sweep.is_due(launches * seconds * 1e3, self._compile_ms[config[:-1]], self._tried)
        return is_due and self._has_time_for(config)

    def _has_time_for(self, config: Config) -> bool:
        if self._builder.knob("compare") == "always":
            return True
        if config[-1] == _WHOLE and self._clusters is not None:
            compile_ms = self._clusters.hot * MS_A_LAUNCH
        else:
            compile_ms = self._compile_ms[config[:-1]]
        return self._builder.spare_time.has_room_for(compile_ms)

    def has_to_be_usual(self) -> bool:
        return self._builder.is_deterministic()

    def is_fixed(self) -> bool:
        return self._builder.knob("policy") != "background" or self._builder.is_deterministic()

    def is_quiet(self) -> bool:
        return not self._builder.compiler.outstanding()

    def compared(self, own: tuple[Config, float], candidate: tuple[Config, float], *, is_kept: bool) -> None:
        counters, is_whole = self._builder.counters, candidate[0][-1] == _WHOLE
        loser = (own if is_kept else candidate)[0]
        if loser:  # the usual variant may have to be launched again, and others share its programs
            self._builder.compiler.forget(self._digests.pop(loser))
        counters.regions_fused += is_whole and is_kept
        counters.programs_swept += not is_whole
        counters.variants_kept += is_kept and not is_whole
        if "cluster" in self._builder.knob("log"):
            times = ", ".join(f"{self._name(config)} {seconds * 1e3:.2f} ms" for config, seconds in (candidate, own))
            kept = self._name((candidate if is_kept else own)[0])
            log.write(f"tpu:{self._device} region at {self._program.line} stays {kept}: {times}")

    def settled(self, config: Config) -> None:
        if self._key is not None:
            self._builder.store.put(self._key, json.dumps(config).encode("ascii"), {"line": self._program.line})

    def _name(self, config: Config) -> str:
        is_whole = self._clusters is None or _WHOLE in config
        options = [name for name in config if name != _WHOLE]
        parts = "whole" if self._clusters is None or is_whole else f"in {len(self._clusters.parts)} parts"
        return " with ".join([parts, *options])

    def bailed_out(self, error: Exception) -> None:
        self._builder.counters.bailouts.note("variants", error, self._program.line)

    def _note(self, error: BaseException | None) -> None:
        """Notes why a variant could not be made, but for those that may not be compiled."""
        cause = error.__cause__ if isinstance(error, NotBuiltError) else error
        if isinstance(cause, Exception) and not isinstance(cause, (NotCompiledError, CancelledError)):
            self.bailed_out(cause)

    def _refuse(self, config: Config, error: BaseException | None) -> None:
        self._note(error)
        if isinstance(error, NotBuiltError) and not isinstance(error.__cause__, NotCompiledError):
            self._builder.refused.update(name for name in config[-1:] if name in self._options)

    def _begins_in_first_tier(self, usual: list[tuple[Program, Plan]]) -> bool:
        """Whether a region whose usual variant is not there is better compiled in the first tier."""
        builder, device, first = self._builder, self._device, self._builder.first_tier()
        if first is None or (self.is_paid(1) and self._price_ms <= first.patience_ms):
            return False
        is_there = builder.compiler.has if builder.knob("policy") == "frozen" else builder.compiler.was_needed
        return not all(is_there(plan, device) for _, plan in usual)

    def _recalled(self, usual: list[Plan]) -> Config | None:
        """The variant that was the fastest; None where that is not known, or nobody may ask."""
        builder, untried = self._builder, self._untried
        if not untried or not builder.store.keeps or builder.is_deterministic():
            return None
        digests = " ".join(plan.key.digest for plan in usual)
        self._key = Key.of("form", {"programs": digests, "variants": repr(self._options)})
        config = builder.store.load(self._key, lambda data: tuple(map(text, items(parsed(data)))))
        return config if config is None or set(untried).issuperset(config) else None

    # what is compiled

    def _found(self, config: Config) -> list[tuple[Program, Plan]]:
        """The different programs of a variant, with their plans under the usual options."""
        return [(program, self._builder.builder.find(program)) for program in self._programs(config)]

    def _programs(self, config: Config) -> list[Program]:
        """The different programs of a variant."""
        if self._clusters is None or _WHOLE in config:
            return [self._program]
        return list({id(part.program): part.program for part in self._clusters.parts}.values())

    def _submitted(
        self, config: Config, found: list[tuple[Program, Plan]], *, is_needed_now: bool = True
    ) -> Future[Any]:
        """The variant, compiled from these; it fails with an `NotBuiltError`."""
        builder, plans, device, made = self._builder.builder, self._builder.plans, self._device, Future[Any]()
        options = tuple(option for name in config for option in self._options.get(name, ()))
        if config == FIRST and self._first is not None:
            options = self._first.options
            self._builder.counters.regions_in_first_tier += 1
            if self._pieces:
                return self._submitted_pieces()
        elif self._builder.is_deterministic():
            options += self._builder.deterministic
        if options:
            found = [(program, plans.under(plan, options)) for program, plan in found]
        wish: dict[str, Any] = {"wisher": None if is_needed_now else made, "tier": _tier_of(config)}
        builds = [builder.submit(program, plan, device, **wish) for program, plan in found]
        asked = (lambda: made) if is_needed_now else weakref.ref(made)
        _when_all(builds, functools.partial(self._tell, config, builds, asked, is_awaited=is_needed_now))
        return made

    def _tell(
        self, config: Config, builds: list[Build], asked: Callable[[], Future[Any] | None], *, is_awaited: bool
    ) -> None:
        """Gives a variant of these programs to who has asked for it and still waits."""
        made, flown = asked(), list(builds)
        builds.clear()  # the flights' callbacks, this one too, would keep the plan until the garbage is collected
        if made is None:
            return
        executables: dict[int, Executable] = {}
        for build in flown:
            with failing(functools.partial(_fail, made, build.about)):
                executables[id(build.program)] = self._builder.builder.executable(build, self._device)
            if made.done():
                return
        with failing(made.set_exception):
            self._digests[config] = [build.plan.key.digest for build in flown]
            self._compile_ms[config] = sum(self._compiles_for(e.loaded) for e in executables.values())
            if config and config != FIRST and not is_awaited:
                self._builder.spare_time.spend(sum(e.loaded.milliseconds for e in executables.values()))
            made.set_result(self._form(executables))

    def _submitted_pieces(self) -> Future[Any]:
        """The pieces, compiled; it fails with an `NotBuiltError`."""
        stock, device, made, pieces = self._builder.stock, self._device, Future[Any](), self._pieces
        self._digests[FIRST] = []  # other regions share them
        in_use = stock.in_use(pieces, device)
        if in_use is not None:
            made.set_result(Parts(self._program, pieces, in_use.__getitem__))
            return made
        builds = stock.submit(pieces, device)

        def tell() -> None:
            flown = dict(builds)
            builds.clear()  # as below
            executables = []
            with failing(made.set_exception):
                for piece in pieces:
                    submitted = flown[piece.identity]
                    with failing(functools.partial(_fail, made, submitted.build.about)):
                        executables.append(stock.executable(piece, submitted, device))
                    if made.done():
                        return
                made.set_result(Parts(self._program, pieces, executables.__getitem__))

        _when_all([submitted.build for submitted in builds.values()], tell)
        return made

    def _form(self, executables: dict[int, Executable]) -> Executable | Parts:
        if id(self._program) in executables or self._clusters is None:
            return executables[id(self._program)]
        parts = self._clusters.parts
        return Parts(self._program, parts, [executables[id(part.program)] for part in parts].__getitem__)

    def _compiles_for(self, loaded: Loaded) -> float:
        """The milliseconds in which a program compiles, about."""
        loading = self._builder.sweep.loading if self._builder.sweep else 1.0
        return loaded.milliseconds * (loading if loaded.source == "disk" else 1.0)


def _tier_of(config: Config) -> Tier:
    """The tier of a variant that is not made of pieces."""
    if config == FIRST:
        return "quick"
    if not config:
        return "usual"
    return "whole" if config == (_WHOLE,) else "swept"


def _fail(made: Future[Any], about: About, error: BaseException) -> None:
    made.set_exception(NotBuiltError(about, error))


def _when_all(builds: Collection[Build], then: Callable[[], None]) -> None:
    """Calls `then` once, when everything is compiled or has failed."""
    left = threading.Semaphore(len(builds) - 1)

    def landed(_: Future[Loaded]) -> None:
        if not left.acquire(blocking=False):
            then()

    for build in list(builds):
        build.flight.add_done_callback(landed)
