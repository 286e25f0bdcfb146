from __future__ import annotations

import gc

from flash.waiting import GC_THRESHOLDS, rare_garbage_collection


def test_of_blocks_that_overlap_the_last_one_restores_what_stood_before():
    gc.unfreeze()
    before = gc.get_threshold()
    first, second = rare_garbage_collection(), rare_garbage_collection()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_freeze_count() > 0
    first.__exit__(None, None, None)
    assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_objects_that_a_fork_server_has_frozen_stay_frozen():
    gc.freeze()
    with rare_garbage_collection():
        pass
    assert gc.get_freeze_count() > 0
