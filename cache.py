"""The flat cache: all K and V in one tensor of pages, shared prefixes in it, found again by their token ids.

`kv: (pages, 2, K, page, D)` holds K (after RoPE) and V; a page is 64 consecutive tokens of one layer.
`table[id, layer]` lists the pages that a *prefix id* reads in a layer, and that is all the indirection
there is (the paper's flat KV cache). A shared prefix owns pages in all layers, written once. A running
request has a private id: below its depth the table names the shared pages, from there up pages of its own;
behind the prefix come the pages of its suffix, so that a forward pass knows one id per request and nothing
about sharing.

The budget is set once, allocated once, never moved. Page 0 is always zero: unused table entries name it.
Page 1 takes the writes of padded rows and is never read.
"""
import math
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from files import BadInput, enough_memory, memory

PAGE = 64
MAX_ENTRIES = 256       # shared prefixes at most: each is a row of the tables, as long as the longest canvas


@dataclass(eq=False)
class Entry:
    """A shared prefix. `users`, the running requests whose tables name its pages, keep it."""
    id: int
    ids: tuple
    salt: tuple             # whose it is, and its stand-in: how many MASK stood behind it
    pages: list = field(repr=False)
    hidden_pages: list = field(repr=False)
    users: int = 0


@dataclass(eq=False)
class Lease:
    """What one running request holds: a private prefix id, its own pages, and maybe a shared entry."""
    id: int
    pages: list = field(repr=False)
    entry: Entry | None


def count_pages(tokens: int) -> int:
    return -(-tokens // PAGE)


class Cache:
    """Pages, their table, and the index of shared prefixes.

    budget: bytes for K, V, boundary hidden states and tables together. boundaries: the layers whose
    entering hidden states are kept with a shared prefix, so that a refresh can start there. key: what sets
    this model and dtype apart from others.
    """

    def __init__(self, config, budget: int, boundaries=(), max_requests=8, device="cpu", dtype=torch.float32,
                 key=""):
        size = torch.finfo(dtype).bits // 8
        kv_bytes = 2 * config.kv_heads * PAGE * config.head_dim * size
        hidden_bytes = PAGE * config.hidden * size
        L, nb = config.layers, len(boundaries)
        page_bytes = kv_bytes + hidden_bytes * nb / L           # hidden pages for as many prefixes as kv has
        ids = self._count_ids(int(budget // page_bytes), L, max_requests)
        # Prefix and suffix may each waste a page's tail; the last column names page 1, where padded rows go.
        columns = count_pages(config.max_len) + 2
        pages = int((budget - ids * (L + nb) * columns * 4) // page_bytes)
        if pages < 3:
            need = (budget - (pages - 3) * page_bytes) / 2**20
            raise BadInput(f"a cache of {budget / 2**20:.3g} MB holds no page; set cache_mb to "
                           f"{math.ceil(need * 100) / 100:g} or more")
        if torch.device(device).type == "cpu" and budget > memory():    # allocated, it would fail when filled
            raise BadInput(f"cache_mb is {budget / 2**20:g} and this machine has {memory() / 2**20:.0f} MB "
                           "in all; set it to less")
        self.layers, self.boundaries, self.budget, self.key = L, list(boundaries), budget, key
        self.max_requests = max_requests
        self.kv_bytes, self.hidden_bytes = kv_bytes, hidden_bytes
        with enough_memory(f"a cache of {budget / 2**20:g} MB on {device}", "set cache_mb to less"):
            at = dict(device=device, dtype=dtype)
            self.kv = torch.zeros(pages, 2, config.kv_heads, PAGE, config.head_dim, **at)
            self.hidden = torch.zeros(max(pages * nb // L, 1), PAGE, config.hidden, **at)
        self.free = list(range(self.kv.shape[0] - 1, 1, -1))    # popped from the end: lowest page first
        self.free_hidden = list(range(self.hidden.shape[0] - 1, 0, -1))
        self.table = torch.zeros(ids, L, columns, dtype=torch.int32, device=device)
        self.table[:, :, -1] = 1
        self.hidden_table = torch.zeros(ids, nb, columns, dtype=torch.int32, device=device)
        self.free_ids = list(range(ids - 1, -1, -1))
        self.index: dict[int, list[Entry]] = {}         # hash of (key, salt, ids) -> entries; ids confirm
        self.entries: dict[int, Entry] = {}             # by prefix id, least recently used first
        self.hits = self.misses = self.evictions = 0

    # -- shared prefixes -------------------------------------------------------------------------------------

    def _hashes(self, ids, salt: str):
        h = hash((self.key, salt))
        for token in ids:
            h = hash((h, token))
            yield h

    def find(self, ids, salt="", length=None) -> Entry | None:
        """The longest stored prefix whose ids equal the first of `ids`, or only one of that `length`."""
        found = None
        for n, h in enumerate(self._hashes(ids if length is None else ids[:length], salt), 1):
            if h in self.index and (length is None or n == length):
                for e in self.index[h]:
                    if e.salt == salt and e.ids == tuple(ids[:n]):
                        found = e
        if found:
            self.entries[found.id] = self.entries.pop(found.id)         # now the most recently used
        return found

    def allocate(self, ids, salt="") -> Entry | None:
        """Pages for a new shared prefix in all layers, or None if there are none. Not yet found by `find`."""
        n, nb = count_pages(len(ids)), len(self.boundaries)
        if not self.make_room(n * self.layers, n * nb):
            return None
        entry = Entry(self.free_ids.pop(), tuple(ids), salt, self._take(self.free, n * self.layers),
                      self._take(self.free_hidden, n * nb))
        self._write(self.table, entry.id, entry.pages, n)
        self._write(self.hidden_table, entry.id, entry.hidden_pages, n)
        return entry

    def publish(self, entry: Entry) -> None:
        """Make a filled entry findable. Its pages are never written again."""
        *_, h = self._hashes(entry.ids, entry.salt)
        self.index.setdefault(h, []).append(entry)
        self.entries[entry.id] = entry

    def discard(self, entry: Entry) -> None:
        """Give back an entry's pages and forget it, published or not."""
        if self.entries.pop(entry.id, None):
            *_, h = self._hashes(entry.ids, entry.salt)
            self.index[h].remove(entry)
            if not self.index[h]:
                del self.index[h]
        self.free += entry.pages
        self.free_hidden += entry.hidden_pages
        self._clear(entry.id)

    def write_boundaries(self, entry: Entry, states: list) -> None:
        """Keep the hidden states (1, P, hidden) entering each boundary layer with a shared prefix."""
        for layer, x in zip(self.boundaries, states):
            rows = self._hidden_rows(torch.tensor([entry.id], device=x.device), layer, x.shape[1])
            self.hidden.view(-1, x.shape[2])[rows] = x

    def read_boundary(self, ids: Tensor, layer: int, P: int) -> Tensor:
        """Hidden states (B, P, hidden) entering `layer` of the shared prefixes ids (B,); a shorter one's
        tail is noise."""
        return self.hidden.view(-1, self.hidden.shape[2])[self._hidden_rows(ids, layer, P)]

    def _hidden_rows(self, ids: Tensor, layer: int, P: int) -> Tensor:
        j = torch.arange(P, device=ids.device)
        pages = self.hidden_table[ids, self.boundaries.index(layer)].long()                     # (B, n)
        return pages[:, j // PAGE] * PAGE + j % PAGE                                            # (B, P)

    # -- running requests ------------------------------------------------------------------------------------

    def pages_needed(self, prefix: int, suffix: int, depth: int, suffix_layers: int) -> int:
        """kv pages of a request's own: deep prefix pages, and the suffix in `suffix_layers` layers (1 or
        L)."""
        return (self.layers - depth) * count_pages(prefix) + suffix_layers * count_pages(suffix)

    def open(self, entry: Entry | None, prefix: int, suffix: int, depth: int,
             suffix_layers: int) -> Lease | None:
        """A private prefix id with all the pages a request will ever write, or None if they cannot be had
        now.

        Layers below `depth` read the pages of `entry`. With suffix_layers = 1 all layers share one set of
        suffix pages: enough when each step computes all suffix rows anew.
        """
        if entry:
            entry.users += 1                            # before making room, or its own entry might go
        own = self.pages_needed(prefix, suffix, depth, suffix_layers)
        if not self.make_room(own, 0):
            if entry:
                entry.users -= 1
            return None
        lease = Lease(self.free_ids.pop(), self._take(self.free, own), entry)
        p, s, L = count_pages(prefix), count_pages(suffix), self.layers
        rows = torch.zeros(L, self.table.shape[2], dtype=torch.int32)
        deep = (L - depth) * p
        rows[depth:, :p] = torch.tensor(lease.pages[:deep], dtype=torch.int32).view(L - depth, p)
        rows[:, p:p + s] = torch.tensor(lease.pages[deep:], dtype=torch.int32).view(suffix_layers, s)
        rows = rows.to(self.table.device)
        if depth:
            rows[:depth, :p] = self.table[entry.id, :depth, :p]
        self.table[lease.id, :, :-1] = rows[:, :-1]
        return lease

    def close(self, lease: Lease) -> None:
        """Give back what a request held."""
        if lease.entry:
            lease.entry.users -= 1
        self.free += lease.pages
        self._clear(lease.id)

    # -- pages -----------------------------------------------------------------------------------------------

    def make_room(self, pages: int, hidden_pages: int, ids=1, keep=()) -> bool:
        """Evict unused entries, but none of `keep`, the least recently used first, until so many pages and
        prefix ids are free. False, and nothing is evicted, if that cannot be."""
        unused = [e for e in self.entries.values() if not e.users and e not in keep]

        def suffices(gone: list) -> bool:
            return (len(self.free) + sum(len(e.pages) for e in gone) >= pages
                    and len(self.free_hidden) + sum(len(e.hidden_pages) for e in gone) >= hidden_pages
                    and len(self.free_ids) + len(gone) >= ids)

        if not suffices(unused):
            return False
        while not suffices([]):
            self.discard(unused.pop(0))
            self.evictions += 1
        return True

    def scrub(self) -> None:
        """After values that are not finite: forget the entries that hold any, and clear what is left. A
        masked column still meets the arithmetic, where 0 * NaN is NaN, so a page must be clean before
        another request gets it."""
        for e in list(self.entries.values()):
            clean = self.kv[e.pages].isfinite().all() and self.hidden[e.hidden_pages].isfinite().all()
            if not e.users and not clean:
                self.discard(e)
        self.kv.nan_to_num_(0, 0, 0)
        self.hidden.nan_to_num_(0, 0, 0)

    def budget_for(self, pages: int, hidden_pages: int) -> int:
        """The budget in bytes that has so many pages."""
        L, nb = self.layers, len(self.boundaries)
        if hidden_pages:
            pages = max(pages, -(-(hidden_pages + 1) * L // nb))
        pages += 2                              # two are never given out
        table = self._count_ids(pages + L, L, self.max_requests) * (L + nb) * self.table.shape[2] * 4
        return math.ceil(pages * (self.kv_bytes + self.hidden_bytes * nb / L)) + table

    @staticmethod
    def _count_ids(pages: int, layers: int, requests: int) -> int:
        """Prefix ids: for as many entries as there are pages for, and the running requests. One with
        guidance has two of both."""
        return max(min(max(pages // layers, 1), MAX_ENTRIES) + requests, 4)

    def _take(self, free: list, n: int) -> list:
        return [free.pop() for _ in range(n)]

    def _write(self, table: Tensor, id: int, pages: list, n: int) -> None:
        if pages:
            table[id, :, :n] = torch.tensor(pages, dtype=torch.int32).view(-1, n).to(table.device)

    def _clear(self, id: int) -> None:
        self.table[id, :, :-1] = 0
        self.hidden_table[id] = 0
        self.free_ids.append(id)

    def stats(self) -> dict:
        """Entries, tokens and bytes now (also of running requests), and what happened so far."""
        used = (self.kv.shape[0] - 2 - len(self.free)) * self.kv_bytes
        used += (self.hidden.shape[0] - 1 - len(self.free_hidden)) * self.hidden_bytes
        return dict(entries=len(self.entries), tokens=sum(len(e.ids) for e in self.entries.values()),
                    bytes=used, budget_bytes=self.budget, hits=self.hits, misses=self.misses,
                    evictions=self.evictions)


class Repeats:
    """Which leading ids were seen before, so that what requests have in common can become a shared prefix.

    Ids are counted in whole blocks of 16 and remembered as one chained hash a block: at most ENTRIES of
    them, some 100 bytes each, the longest unseen forgotten first. A false match costs an entry nobody
    finds, never a wrong token.
    """
    BLOCK, ENTRIES = 16, 16384

    def __init__(self):
        self.seen = OrderedDict()

    def count(self, ids, salt="") -> int:
        """How many leading ids, in whole blocks, an earlier call had too. Remembers these."""
        h, common = hash(salt), 0
        for end in range(self.BLOCK, len(ids) + 1, self.BLOCK):
            h = hash((h, *ids[end - self.BLOCK:end]))
            if h in self.seen:
                common = end
                self.seen.move_to_end(h)
            else:
                self.seen[h] = None
        while len(self.seen) > self.ENTRIES:
            self.seen.popitem(last=False)
        return common
