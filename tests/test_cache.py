"""The flat cache by itself: what is found, what is counted, what is given back."""
import pytest
import torch
from conftest import tiny

import cache as cache_module
from cache import PAGE, Cache

CONFIG = tiny().config


def fill(cache, ids, salt=""):
    entry = cache.allocate(ids, salt)
    cache.publish(entry)
    return entry


def test_longest_equal_prefix_wins():
    """The longest stored prefix whose ids equal the first of the prompt; never one that differs, never a
    part of one."""
    cache = Cache(CONFIG, 2**22)
    short, long = fill(cache, [1, 2, 3]), fill(cache, [1, 2, 3, 4, 5])
    assert cache.find([1, 2, 3, 4, 5, 6]) is long
    assert cache.find([1, 2, 3, 4]) is short and cache.find([1, 2, 3]) is short
    assert cache.find([1, 2]) is None and cache.find([2, 2, 3, 4, 5, 6]) is None
    assert cache.find([1, 2, 3, 4, 5, 6], length=3) is short
    assert cache.find([1, 2, 3, 4, 5, 6], length=4) is None


def test_equal_hashes_do_not_confuse(monkeypatch):
    """The hash only finds; the ids confirm. With a hash that is always equal, lookups are still right."""
    monkeypatch.setattr(cache_module.Cache, "_hashes", lambda self, ids, salt: (7 for _ in ids))
    cache = Cache(CONFIG, 2**22)
    a, b, other = fill(cache, [1, 2]), fill(cache, [3, 4]), fill(cache, [1, 2], "salt")
    assert cache.find([1, 2, 9]) is a and cache.find([3, 4, 9]) is b and cache.find([1, 2], "salt") is other
    cache.discard(a)
    assert cache.find([1, 2, 9]) is None and cache.find([3, 4]) is b


def test_salt_and_key_are_part_of_the_name():
    cache = Cache(CONFIG, 2**22)
    fill(cache, [1, 2], "a")
    assert cache.find([1, 2], "a") and cache.find([1, 2], "b") is None and cache.find([1, 2]) is None
    one, other = (Cache(CONFIG, 2**20, key=key) for key in "xy")
    assert list(one._hashes([1], "")) != list(other._hashes([1], ""))


def test_tables_name_shared_pages_below_the_depth_and_own_pages_above():
    cache = Cache(CONFIG, 2**22, boundaries=(1, 2, 3))
    P, S, depth, L = PAGE + 5, 2 * PAGE, 2, CONFIG.layers
    entry = fill(cache, range(P))
    lease = cache.open(entry, P, S, depth, suffix_layers=L)
    shared, own = cache.table[entry.id], cache.table[lease.id]
    assert torch.equal(own[:depth, :2], shared[:depth, :2])
    private = own[depth:, :2].flatten().tolist() + own[:, 2:4].flatten().tolist()
    assert sorted(private) == sorted(lease.pages) and not set(private) & {0, 1, *entry.pages}
    assert (own[:, 4:-1] == 0).all() and (own[:, -1] == 1).all()    # zero, and padded rows
    one = cache.open(entry, P, S, depth, suffix_layers=1)
    assert (cache.table[one.id, :, 2:4] == cache.table[one.id, 0, 2:4]).all()
    assert len(one.pages) == cache.pages_needed(P, S, depth, 1) == (L - depth) * 2 + 2


def test_least_recently_used_unused_entries_go_first():
    """Only entries that no running request points at are evicted, the least recently used first."""
    page = 2 * CONFIG.kv_heads * PAGE * CONFIG.head_dim * 4
    cache = Cache(CONFIG, (3 * CONFIG.layers + 5) * page)       # three one-page prefixes and two pages more
    a, b, c = (fill(cache, [i]) for i in range(3))
    lease = cache.open(a, 1, 1, CONFIG.layers, 1)
    cache.find([1])                                                 # b is now the most recently used
    d = fill(cache, [3])
    assert set(cache.entries) == {a.id, b.id, d.id} and cache.find([2]) is None and cache.evictions == 1
    fill(cache, [4])
    assert cache.find([1]) is None and cache.find([0]) is a         # a is the oldest, and in use
    cache.close(lease)
    fill(cache, [5]), fill(cache, [6])
    assert len(cache.entries) == 3
    assert cache.open(None, 0, 99 * PAGE, 0, 1) is None and len(cache.entries) == 3     # nothing is evicted


def test_everything_is_given_back():
    """Opened and closed a thousand times, the cache ends as it began, its table included."""
    cache = Cache(CONFIG, 2**21, boundaries=(1, 2))
    def state():
        free = sorted(cache.free), sorted(cache.free_hidden), sorted(cache.free_ids)
        return *free, cache.table.sum().item()

    before = state()
    for i in range(1000):
        entry = fill(cache, range(i % 90 + 1))
        lease = cache.open(entry, i % 90 + 1, i % 70, i % 5, 1 + 3 * (i % 2))
        cache.close(lease)
        cache.discard(entry)
    assert state() == before and not cache.index and not cache.entries


@pytest.mark.parametrize("boundaries", [(), (1, 2, 3)])
def test_stats_and_budget(boundaries):
    """The tensors take no more bytes than the budget, and `bytes` counts pages in use."""
    cache = Cache(CONFIG, 2**20, boundaries)
    floats = cache.kv.numel() + cache.hidden.numel() * bool(boundaries)
    held = (floats + cache.table.numel() + cache.hidden_table.numel()) * 4
    assert 0.9 * 2**20 < held <= 2**20
    empty = cache.stats()
    assert empty == dict(entries=0, tokens=0, bytes=0, budget_bytes=2**20, hits=0, misses=0, evictions=0)
    fill(cache, range(PAGE + 1))
    stats = cache.stats()
    assert (stats["entries"], stats["tokens"]) == (1, PAGE + 1)
    assert stats["bytes"] == 2 * CONFIG.layers * cache.kv_bytes + 2 * len(boundaries) * cache.hidden_bytes
