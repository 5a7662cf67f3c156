"""Continuous batching over a paged cache: which tokens a step feeds, and where they are stored.

Everything here is on the host and knows nothing of attention. The true tokens of a request are
drawn when it arrives, so that which steps are taken depends on the seed alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[np.int64]

# What the block table holds past a sequence's pages: nobody may follow it.
NO_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Load:
    """What the server has and what is asked of it.

    Attributes:
        block_size: ``N``, tokens of a page.
        num_pages: ``P``, few enough that sequences must now and then give theirs up.
        num_columns: ``W``, most pages of a sequence.
        max_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        arrivals: requests per step, on average; the rate swings between 0 and twice that.
        period: steps from one peak to the next.
        prompt, output: shortest and longest, with more short ones than long ones (tokens).
        prefix: tokens of the prompts that several requests begin with; no whole number of pages.
        cancelled: share of the steps in which some request is given up.
        vocabulary: values of a token.
    """

    block_size: int
    num_pages: int
    num_columns: int
    max_seqs: int
    max_tokens: int
    arrivals: float
    period: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    prefix: int
    cancelled: float = 0.01
    vocabulary: int = 256


MIN_DRAFTS, MAX_DRAFTS = 2, 4
NUM_PREFIXES = 2
COUNTS = (
    "arrived",
    "finished",
    "cancelled",
    "preempted",
    "tokens",
    "rejected",
    "pages rolled back",
    "prefixes shared",
)
# In the order in which they stand in a step.
KINDS = ("decode", "drafts", "prefill")
# Shares of the requests that speculate and that begin with a common prefix, and of the drafts that
# are wrong.
SPECULATING, PREFIXED, WRONG = 0.4, 0.7, 0.3


@dataclass(eq=False)
class Request:
    """One sequence.

    Attributes:
        number: in the order of arrival.
        stream: its true tokens, prompt and output.
        known: how many of them are known so far, the prompt and what was generated.
        speculates: whether its decode steps carry drafts.
        prefix: which common prefix it begins with, -1 for none.
        computed: how many of them are in the cache.
        pages: where those lie, and those that the current step adds.
        row: its row of the block table; -1 while it waits.
    """

    number: int
    stream: Tokens
    known: int
    speculates: bool
    prefix: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = -1

    @property
    def decodes(self) -> bool:
        return self.known - self.computed == 1

    @property
    def finished(self) -> bool:
        return self.known == len(self.stream)


@dataclass(frozen=True)
class Chunk:
    """What one sequence feeds in one step.

    Attributes:
        kind: one of `KINDS`.
        request: whose tokens.
        context: tokens of it that are in the cache already.
        tokens: the next ones; drafts among them may be wrong.
        right: how many of `tokens` are; the others are rolled back.
    """

    kind: str
    request: Request
    context: int
    tokens: Tokens
    right: int

    @property
    def history(self) -> Tokens:
        """Every token of the sequence up to the last one fed."""
        return np.concatenate([self.request.stream[: self.context], self.tokens])


class PagePool:
    """Pages, how many sequences hold each, and the free ones."""

    def __init__(self, num_pages: int, rng: np.random.Generator) -> None:
        self.holders = np.zeros(num_pages, dtype=np.int64)
        # The page freed last is the next one taken.
        self.free: list[int] = rng.permutation(num_pages).tolist()
        self.freed: list[int] = []
        self.used = np.zeros(num_pages, dtype=bool)
        self.reused = 0

    def take(self) -> int:
        page = self.free.pop()
        self.reused += int(self.used[page])
        self.used[page] = True
        self.holders[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        self.holders[list(pages)] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)
                self.freed.append(page)

    def drain_freed(self) -> list[int]:
        """The pages freed since the last call; some may have been taken again."""
        freed, self.freed = self.freed, []
        return freed

    def errors(self, held: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong if sequences hold the pages `held` and nobody else holds any."""
        num_pages = len(self.holders)
        pages = [page for one in held for page in one]
        counts = np.bincount(np.array(pages, dtype=np.int64), minlength=num_pages)
        free = np.bincount(np.array(self.free, dtype=np.int64), minlength=num_pages)
        found = []
        if (counts != self.holders).any():
            page = int((counts != self.holders).argmax())
            found.append(f"page {page} has {self.holders[page]} holders, {counts[page]} found")
        if (free != (counts == 0)).any():
            page = int((free != (counts == 0)).argmax())
            found.append(f"page {page} is {free[page]} times free and {counts[page]} times held")
        return found


class Scheduler:
    """Takes requests in, plans steps, and takes the tokens that were right as generated.

    A step is planned by :meth:`plan`, run by somebody, and ended by :meth:`commit`. Decode rows
    come first, single ones before those with drafts, then chunks of prompts within what is left of
    the step's tokens. Older requests come first; for want of pages the youngest gives up its own
    and starts over later.
    """

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.rng = np.random.default_rng(seed)
        self.pool = PagePool(load.num_pages, self.rng)
        self.prefixes = [self._tokens(load.prefix) for _ in range(NUM_PREFIXES)]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.rows = list(range(load.max_seqs))
        shape = (load.max_seqs, load.num_columns)
        self.block_table = torch.full(shape, NO_PAGE, dtype=torch.int32)
        self.steps = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))

    def plan(self) -> list[Chunk]:
        """The next step, its pages allotted; no chunks where there is nothing to do."""
        self._arrive()
        if self.running and self.rng.random() < self.load.cancelled:
            self._leave(self.running[self.rng.integers(len(self.running))])
            self.counts["cancelled"] += 1
        self._admit()
        chunks: dict[Request, Chunk] = {}
        budget = self.load.max_tokens
        for request in sorted(self.running, key=lambda request: not request.decodes):
            # Others may have made it give up its pages meanwhile.
            if request.row < 0 or budget == 0:
                continue
            chunk = self._next_chunk(request, budget)
            if self._reserve(request, chunk.context + len(chunk.tokens), chunks):
                chunks[request] = chunk
                budget -= len(chunk.tokens)
        return sorted(chunks.values(), key=lambda chunk: KINDS.index(chunk.kind))

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Keep what was right of a step, roll the rest back, and let finished sequences go."""
        self.steps += 1
        for chunk in chunks:
            request = chunk.request
            self.counts["tokens"] += len(chunk.tokens)
            self.counts["rejected"] += len(chunk.tokens) - chunk.right
            request.computed += chunk.right
            if request.computed >= request.known:
                # The step's last right row gave the next token.
                request.known = request.computed + 1
            if request.finished:
                self._leave(request)
                self.counts["finished"] += 1
            else:
                self._trim(request)

    def cancel_all(self) -> None:
        """End every request, running or waiting."""
        while self.running:
            self._leave(self.running[-1])
        self.waiting.clear()

    def errors(self, chunks: Sequence[Chunk]) -> list[str]:
        """What is wrong with the pages of a planned step."""
        found = self.pool.errors(request.pages for request in self.running)
        size = self.load.block_size
        for chunk in chunks:
            request, end = chunk.request, chunk.context + len(chunk.tokens)
            if len(request.pages) * size < end:
                found.append(f"request {request.number} has too few pages for {end} tokens")
            written = request.pages[chunk.context // size :]
            if (self.pool.holders[written] != 1).any():
                found.append(f"request {request.number} writes to pages that others hold")
        return found

    def _arrive(self) -> None:
        swing = 1 + math.sin(2 * math.pi * self.steps / self.load.period)
        for _ in range(self.rng.poisson(self.load.arrivals * swing)):
            prompt, output = self._length(self.load.prompt), self._length(self.load.output)
            prefix = -1
            tokens = self._tokens(prompt + output)
            if prompt > self.load.prefix and self.rng.random() < PREFIXED:
                prefix = int(self.rng.integers(NUM_PREFIXES))
                tokens[: self.load.prefix] = self.prefixes[prefix]
            speculates = bool(self.rng.random() < SPECULATING)
            request = Request(self.counts["arrived"], tokens, prompt, speculates, prefix)
            self.waiting.append(request)
            self.counts["arrived"] += 1

    def _admit(self) -> None:
        while self.waiting and self.rows:
            # Those who would at once have to give way stay out.
            if self._pages_of(self.waiting[0].known) > len(self.pool.free):
                return
            request = self.waiting.popleft()
            request.row = self.rows.pop()
            self._share_prefix(request)
            self.running.append(request)

    def _share_prefix(self, request: Request) -> None:
        """Start behind the whole pages of the prefix, if some sequence has them."""
        count = self.load.prefix // self.load.block_size
        for donor in self.running if request.prefix >= 0 else ():
            if donor.prefix == request.prefix and donor.computed >= count * self.load.block_size:
                self._append(request, donor.pages[:count])
                self.pool.share(request.pages)
                request.computed = count * self.load.block_size
                self.counts["prefixes shared"] += 1
                return

    def _next_chunk(self, request: Request, budget: int) -> Chunk:
        begin, known = request.computed, request.known
        if not request.decodes:
            tokens = request.stream[begin : min(known, begin + budget)]
            return Chunk("prefill", request, begin, tokens, len(tokens))
        drafts = 0
        if request.speculates:
            # The last row's own token must be one of the request's.
            room = min(budget, len(request.stream) - known) - 1
            drafts = min(int(self.rng.integers(MIN_DRAFTS, MAX_DRAFTS + 1)), max(room, 0))
        tokens = request.stream[begin : known + drafts].copy()
        wrong = np.flatnonzero(self.rng.random(drafts) < WRONG)
        tokens[1 + wrong] = (tokens[1 + wrong] + 1) % self.load.vocabulary
        right = 1 + (int(wrong[0]) if len(wrong) else drafts)
        return Chunk("drafts" if drafts else "decode", request, begin, tokens, right)

    def _reserve(self, request: Request, length: int, planned: dict[Request, Chunk]) -> bool:
        """Give `request` the pages of `length` tokens; from younger ones if none are free."""
        missing = self._pages_of(length) - len(request.pages)
        while len(self.pool.free) < missing:
            victim = self.running[-1]
            if victim is request or victim in planned:
                return False
            self._leave(victim)
            victim.computed = 0
            self.waiting.appendleft(victim)
            self.counts["preempted"] += 1
        self._append(request, [self.pool.take() for _ in range(missing)])
        return True

    def _append(self, request: Request, pages: Sequence[int]) -> None:
        first = len(request.pages)
        request.pages.extend(pages)
        for column, page in enumerate(pages, first):
            self.block_table[request.row, column] = page

    def _trim(self, request: Request) -> None:
        """Free the pages that only drafts which were wrong had reached."""
        needed = self._pages_of(request.computed)
        surplus = request.pages[needed:]
        if surplus:
            del request.pages[needed:]
            self.block_table[request.row, needed:] = NO_PAGE
            self.pool.release(surplus)
            self.counts["pages rolled back"] += len(surplus)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.pages.clear()
        self.block_table[request.row] = NO_PAGE
        self.rows.append(request.row)
        request.row = -1

    def _pages_of(self, length: int) -> int:
        return -(-length // self.load.block_size)

    def _length(self, bounds: tuple[int, int]) -> int:
        shortest, longest = bounds
        return shortest + int((longest - shortest + 1) * self.rng.random() ** 2)

    def _tokens(self, count: int) -> Tokens:
        return self.rng.integers(self.load.vocabulary, size=count)


def gather_table(scheduler: Scheduler, chunks: Sequence[Chunk]) -> Tensor:
    """int32 ``[b, W]``: the block table's rows of `chunks`."""
    return scheduler.block_table[[chunk.request.row for chunk in chunks]]
