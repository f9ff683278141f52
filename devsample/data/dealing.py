"""The chain's side of its streams: asks for places in them, and puts what comes in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from devsample.data.streams import StreamBatch, StreamEnd, Ticket
from devsample.data.worker import BatchRequest
from devsample.errors import LoaderError
from devsample.seeds import ChainKey


@dataclass
class Stream:
    """How far one stream has been handed out; outlives the loader's iterators."""

    chain: int
    key: ChainKey
    role: int
    epoch: int = 0
    position: int = 0
    """With ``epoch``: where the next batch is sought."""
    index: int = 0
    """Batches handed out or passed over."""
    samples: int = 0
    """Samples handed out since the beginning."""
    limit: int | None = None
    """Samples after which the stream ends; it then ends with its first epoch, too."""

    def restart(self) -> None:
        """Go back to its beginning."""
        self.epoch = self.position = self.index = self.samples = 0


@dataclass
class _Course:
    """One stream while a dealer is at work."""

    stream: Stream
    epoch: int
    position: int
    asked: int
    """The place after the last one that was asked for."""
    arrived: int
    """Batches that have come, counted like places."""
    owed: int = 0
    """Tickets to be issued before the next request is looked at."""
    gap: int = 0
    """How many of them are for batches to be passed over."""
    under_way: int = 0
    ends: int = 0
    """Ends in a row; as many as there are shares make an epoch."""
    items: dict[int, int] = field(default_factory=dict)
    waiting: deque[BatchRequest] = field(default_factory=deque)
    ready: deque[tuple[Ticket, StreamBatch]] = field(default_factory=deque)

    @property
    def is_over(self) -> bool:
        """Whether a stream with a limit has nothing more to give."""
        if self.stream.limit is None:
            return False
        epoch = self.ready[0][0].epoch if self.ready else self.epoch
        return self.stream.samples >= self.stream.limit or epoch > 0


@dataclass(frozen=True)
class Epoch:
    """What an epoch of a stream turned out to be."""

    items: int
    empty_shares: int
    shares: int


class Dealer:
    """Sampler of the wrapped loader while it serves streams: requests become tickets.

    A ticket may bring no batch, when the data or a share of it has ended. Another one is then
    issued, and the batches of a stream go to its requests in the order in which they arrive.

    Args:
        streams: all streams so far, by (chain, role); new ones are added.
        keys: the keys of all chains.
        requests: what is to be served, each stream's places in ascending order.
        shares: in how many shares a data set that divides itself is read.
        workers: how many processes take turns at the tickets.
    """

    def __init__(
        self,
        streams: dict[tuple[int, int], Stream],
        keys: Sequence[ChainKey],
        requests: Iterable[BatchRequest],
        shares: int,
        workers: int,
    ) -> None:
        self._streams, self._keys, self._requests = streams, keys, iter(requests)
        self._shares, self._workers = max(1, shares), max(1, workers)
        self.divided: bool | None = None if self._shares > 1 else False
        """Whether the data set divides itself, once that is known."""
        self.differs = False
        """Whether two processes read the same part of the data differently."""
        self._courses: dict[tuple[int, int], _Course] = {}
        self._line: deque[BatchRequest] = deque()
        self._issued: deque[Ticket | None] = deque()
        self._turn = 0  # of the worker that gets the next ticket
        self._digests: dict[tuple[int, int, int, int], str] = {}
        self.epochs: list[Epoch] = []
        """The epochs that have ended."""

    def __iter__(self) -> Iterator[Ticket | None]:
        self._turn = 0  # a loader that starts anew starts with its first worker
        return self

    def __next__(self) -> Ticket | None:
        """The next ticket; None, to be answered by nothing, makes it another worker's turn."""
        for course in self._courses.values():
            if course.owed > 0:
                return self._issue(course)
        request = next(self._requests)
        course = self._course(request)
        if request.place < course.asked:
            self._go_back(course)
        if course.under_way == 0:
            course.gap = request.place - course.asked
        course.owed += request.place - course.asked + 1
        course.asked = request.place + 1
        course.waiting.append(request)
        self._line.append(request)
        return self._issue(course)

    @property
    def idle(self) -> bool:
        """Whether every request that was looked at has been served."""
        return not self._line

    @property
    def due(self) -> BatchRequest | None:
        """The request that is served next, if one was looked at."""
        return self._line[0] if self._line else None

    def take(self, reply: StreamBatch | StreamEnd | None) -> None:
        """What the oldest ticket brought."""
        ticket = self._issued.popleft()
        if ticket is None or reply is None:
            return
        course = self._courses[ticket.chain, ticket.role]
        course.under_way -= 1
        if isinstance(reply, StreamEnd):
            if not course.is_over:
                course.owed += 1
            if ticket.epoch == course.epoch:
                self._end(course, ticket, reply)
            return
        self.divided = reply.divided
        self._compare(ticket, reply)
        course.ends = 0
        place, course.arrived = course.arrived, course.arrived + 1
        matched = len(course.ready)
        if matched < len(course.waiting) and place == course.waiting[matched].place:
            assert ticket.wanted
            course.ready.append((ticket, reply))
        elif not matched:
            _hand_on(course.stream, ticket, place)

    def ready(self) -> Iterator[tuple[BatchRequest, StreamBatch]]:
        """Requests that can be served now, in order."""
        while self._line:
            course = self._course(self._line[0])
            if course.is_over:  # nobody waits for the rest
                self._line.popleft()
                course.waiting.clear()
                course.ready.clear()
                course.owed = 0
                continue
            if not course.ready:
                return
            request = self._line.popleft()
            course.waiting.popleft()
            ticket, reply = course.ready.popleft()
            course.stream.samples += reply.size
            _hand_on(course.stream, ticket, request.place)
            yield request, reply

    def _course(self, request: BatchRequest) -> _Course:
        name = request.chain, request.role
        if name not in self._courses:
            if name not in self._streams:
                self._streams[name] = Stream(request.chain, self._keys[request.chain], request.role)
            stream = self._streams[name]
            self._courses[name] = _Course(stream, stream.epoch, stream.position, stream.index, stream.index)
        return self._courses[name]

    def _go_back(self, course: _Course) -> None:
        if course.under_way or course.waiting:
            raise AssertionError("the places of a stream must be asked for in ascending order")
        course.stream.restart()
        course.epoch = course.position = course.asked = course.arrived = course.ends = 0
        course.items = {}

    def _issue(self, course: _Course) -> Ticket | None:
        """The next ticket of a stream, when it is the turn of the worker that reads its share."""
        turn, self._turn = self._turn, (self._turn + 1) % self._workers
        if self.divided is not False and turn != course.position % self._shares:
            self._issued.append(None)
            return None
        course.owed -= 1
        course.under_way += 1
        wanted = course.gap == 0
        course.gap -= not wanted
        stream = course.stream
        ticket = Ticket(stream.chain, stream.key, stream.role, course.epoch, course.position, wanted)
        course.position += 1
        self._issued.append(ticket)
        return ticket

    def _compare(self, ticket: Ticket, reply: StreamBatch) -> None:
        """Whether all processes that read a share of an epoch read the same."""
        if not reply.digest:
            return
        share = ticket.position % self._shares if reply.divided else 0
        name = ticket.chain, ticket.role, ticket.epoch, share
        if self._digests.setdefault(name, reply.digest) != reply.digest:
            self.differs = True
        for old in [one for one in self._digests if one[:2] == name[:2] and one[2] < ticket.epoch - 1]:
            del self._digests[old]

    def _end(self, course: _Course, ticket: Ticket, reply: StreamEnd) -> None:
        shares = self._shares if reply.divided else 1
        course.items[ticket.position % shares] = reply.items
        course.ends += 1
        if course.ends < shares:
            return
        found = Epoch(sum(course.items.values()), list(course.items.values()).count(0), shares)
        if found.items == 0:
            raise LoaderError(
                f"loader_spec.dataset: the data set gave no items in epoch {course.epoch + 1}. If it can be "
                "read only once, let __iter__ return a new iterator each time."
            )
        self.epochs.append(found)
        course.epoch += 1
        course.position, course.ends, course.items = 0, 0, {}


def _hand_on(stream: Stream, ticket: Ticket, place: int) -> None:
    stream.epoch, stream.position, stream.index = ticket.epoch, ticket.position + 1, place + 1
