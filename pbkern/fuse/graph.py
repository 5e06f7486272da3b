"""Node, Edge, Partition: a jaxpr as nodes that run one after the other, with the decisions that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from jax.extend import core as jex

from pbkern.core.errors import InternalError
from pbkern.core.jaxprs.walks import atoms
from pbkern.core.lazy_dataclass import dataclass
from pbkern.core.ops.scatter import SCATTERS
from pbkern.fuse.tiling.schedule import Schedule


@dataclass(eq=False)
class Node:
    """Equations that run as one step: a group (one kernel), an alias, a hand-written kernel, control flow, or left to XLA.

    Attributes:
      outputs: values that others may read.
      schedule: of a group. Outputs that only `finish` reads are not among the node's.
      kernel: name of its kernel.
      finish: the kernel's last stage (fuse/partition/final_reductions.py); its outputs are the
        node's as well.
      search_steps: lets the bodies of a loop take several steps at a time, if that pays; None behind the search.
      shares: result of control flow or of a hand-written kernel -> the operand whose memory its bodies or it update.
    """

    kind: str  # "group", "alias", "kernel", "control", "xla"
    eqns: list
    outputs: list = field(default_factory=list)
    schedule: Schedule | None = None
    reason: str = ""
    kernel: str = ""
    inner: dict[str, Inner] = field(default_factory=dict)
    search_steps: Callable[[Node], None] | None = field(default=None, repr=False)
    finish: Node | None = None
    shares: dict = field(default_factory=dict)
    # Memo of `reads`: equations and last stage, and the answer.
    _reads_memo: tuple = field(default=(None, None, frozenset()), init=False, repr=False)

    @property
    def own_schedule(self) -> Schedule:
        """The schedule, of a node that is a group: each is made with one."""
        if self.schedule is None:
            raise InternalError(f"a node of kind `{self.kind}` has no schedule")
        return self.schedule

    @property
    def seconds(self) -> float:
        seconds = self.schedule.cost.seconds if self.schedule else 0.0
        return seconds + (self.finish.seconds if self.finish else 0.0)

    @property
    def overwrites(self) -> dict:
        """Result -> the operand whose memory it takes."""
        if self.schedule is None:
            return self.shares
        inputs, outputs = self.schedule.requests.inputs, self.schedule.outputs
        return {outputs[place][0]: inputs[at][0] for at, place in self.schedule.aliases}

    def takes_several_steps(self) -> bool:
        """Whether a body of a loop takes several steps at a time.

        The first question searches, which takes long: it is asked where the host may run the loop.
        """
        search, self.search_steps = self.search_steps, None
        if search is not None:
            search(self)
        return any(body.steps > 1 for body in self.inner.values())

    def scatters(self) -> bool:
        return any(eqn.primitive.name in SCATTERS for eqn in self.eqns)

    def reads(self) -> frozenset:
        """Values that others make.

        Memoised: asked far more often than `eqns`, a list that is replaced, changes.
        """
        if self.schedule is not None and self.schedule.loop is not None:
            return frozenset(self.schedule.loop.reads())
        if self._reads_memo[0] is not self.eqns or self._reads_memo[1] is not self.finish:
            eqns = [*self.eqns, *(self.finish.eqns if self.finish else ())]
            computed = {var for eqn in eqns for var in eqn.outvars}
            self._reads_memo = (
                self.eqns,
                self.finish,
                frozenset(atom for eqn in eqns for atom in atoms(eqn) if atom not in computed),
            )
        return self._reads_memo[2]


@dataclass(frozen=True)
class Edge:
    """One decision: whether `producer` was fused into its consumers, with the modelled times.

    Attributes:
      before, after: predicted seconds of the kernels apart and of one kernel in their place; 0
        where there is no such kernel.
      superseded: a refusal that a later decision has taken back: the producer ended in the kernels
        of all its consumers.
    """

    producer: jex.JaxprEqn
    fused: bool
    why: str
    bytes_saved: int = 0
    before: float = 0.0
    after: float = 0.0
    superseded: bool = False


@dataclass
class Partition:
    nodes: list[Node]
    edges: list[Edge]

    def __str__(self) -> str:
        """A line per node: its kind, number of equations, results and modelled time."""
        rows = []
        for node in self.nodes:
            names = ", ".join(eqn.primitive.name for eqn in node.eqns)
            results = " ".join(output.aval.str_short() for output in node.outputs)
            time = f", {node.seconds * 1e6:.2f} us" if node.schedule else ""
            rows.append(f"{node.kind} of {len(node.eqns)}{time} -> {results}\n  {names}")
        return "\n".join(rows)

    def groups(self) -> list[Node]:
        """Groups of this jaxpr and of the control flow in it."""
        groups = [node for node in self.nodes if node.kind == "group"]
        return groups + [
            group
            for node in self.nodes
            for i in node.inner.values()
            for group in i.partition.groups()
        ]


@dataclass
class Inner:
    """A jaxpr of a control-flow equation, partitioned.

    Attributes:
      ordered: its nodes in an order to run them.
      steps: how many steps of the loop the body does at once.
    """

    jaxpr: jex.Jaxpr
    partition: Partition
    ordered: list[Node]
    steps: int = 1


def order(nodes: Iterable[Node], available: Iterable) -> list[Node]:
    """The nodes, each after those that it reads from and, if possible, after readers of an operand that it overwrites."""
    waiting, known, done = list(nodes)[::-1], set(available), []
    rivals = other_readers(waiting)
    while waiting:
        able = [candidate for candidate in waiting if candidate.reads() <= known]
        assert able, "groups depend on each other in a circle"
        ready = [node for node in able if not any(r in waiting for r in rivals.get(node, ()))]
        for node in ready or able[:1]:
            done.append(node)
            known.update(node.outputs)
        waiting = [candidate for candidate in waiting if candidate not in (ready or able[:1])]
    return done


def other_readers(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Node that overwrites an operand -> the other nodes that read it, or a view of it."""
    views = {node.outputs[0]: node.eqns[0].invars[0] for node in nodes if node.kind == "alias"}
    writers = {operand: node for node in nodes for operand in node.overwrites.values()}
    readers: dict[Node, list[Node]] = {}
    for node in nodes if writers else ():
        for var in node.reads() if node.kind != "alias" else ():
            while var in views:
                var = views[var]
            if writers.get(var, node) is not node:
                readers.setdefault(writers[var], []).append(node)
    return readers


def overwritten(ordered: Sequence[Node], read_later: Iterable = ()) -> dict:
    """Result -> the operand whose memory it takes, where neither a later node nor what follows them reads that operand.

    read_later: values that are read behind all the nodes.
    """
    place, rivals = {node: n for n, node in enumerate(ordered)}, other_readers(ordered)
    pairs = {
        result: operand
        for node in ordered
        if all(place[reader] < place[node] for reader in rivals.get(node, ()))
        for result, operand in node.overwrites.items()
    }
    if not pairs:
        return {}
    views = {node.outputs[0]: node.eqns[0].invars[0] for node in ordered if node.kind == "alias"}

    def array(var):
        while var in views:
            var = views[var]
        return var

    busy = set(map(array, read_later))
    return {result: operand for result, operand in pairs.items() if array(operand) not in busy}
