from miles.loop.worker import WorkerContext
from miles.observe.heartbeat import Heartbeat


def test_a_stop_is_seen_and_calls_back_once():
    context = WorkerContext(Heartbeat(lambda message: None))
    called: list[str] = []
    context.on_stop(lambda: called.append("before"))
    assert not context.stop_requested()
    context.request_stop()
    context.request_stop()
    context.on_stop(lambda: called.append("after"))
    assert context.stop_requested()
    assert called == ["before", "after"]
