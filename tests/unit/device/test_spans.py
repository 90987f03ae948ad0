from __future__ import annotations

from onebudget.device.spans import Span, SpanIndex, SpanState


def chain(span: Span) -> list[tuple[int, int]]:
    spans, at = [], span
    while at is not None:
        spans.append((at.start, at.nbytes))
        assert at.next is None or (at.next.prev is at and at.next.start == at.end)
        at = at.next  # type: ignore[assignment]
    return spans


def test_splitting_and_joining_keep_the_chain() -> None:
    head = Span("arena", 0, 100, SpanState.IDLE)
    tail = head.split(30)
    middle = head.split(10)
    assert chain(head) == [(0, 10), (10, 20), (30, 70)]
    assert (middle.start, tail.end) == (10, 100)
    middle.absorb_next()
    assert chain(head) == [(0, 10), (10, 90)]
    head.absorb_next()
    assert chain(head) == [(0, 100)]


def test_best_fit_is_the_smallest_that_holds() -> None:
    index = SpanIndex()
    spans = {size: Span("arena", size * 1000, size, SpanState.IDLE) for size in (10, 20, 40)}
    for span in spans.values():
        index.add(span)
    assert index.pop_exact(15) is None
    assert index.pop_best(15) is spans[20]
    assert spans[20].state is SpanState.USED
    assert index.pop_best(15) is spans[40]
    assert index.pop_best(15) is None
    assert index.pop_best(10) is spans[10]
    assert index.spans() == []


def test_spans_of_different_arenas_may_start_at_the_same_place() -> None:
    index = SpanIndex()
    first, second = (Span(arena, 0, 10, SpanState.BARE) for arena in "ab")
    index.add(first)
    index.add(second)
    index.remove(first)
    assert index.spans() == [second]
