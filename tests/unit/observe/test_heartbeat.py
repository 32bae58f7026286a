import json
import os
import threading

from miles.observe.heartbeat import Heartbeat, send_to_pipe


def test_phases_steps_and_progress_reach_the_other_side():
    messages: list[dict] = []
    heartbeat = Heartbeat(messages.append)
    heartbeat.set_phase("load")
    heartbeat.set_step(0, num_steps=4)
    heartbeat.set_phase("generate", detail="16 prompts")
    heartbeat.progress("3 of 16")
    heartbeat.report_step(0, {"train/loss": 0.5}, num_steps=4)
    heartbeat.report_error("no more", 2)
    heartbeat.start()
    heartbeat.close()
    generate = messages[2]
    assert (generate["phase"], generate["step"], generate["num_steps"], generate["detail"]) == (
        "generate",
        0,
        4,
        "16 prompts",
    )
    assert messages[3] == {"kind": "step", "step": 0, "num_steps": 4, "metrics": {"train/loss": 0.5}}
    assert messages[4] == {"kind": "error", "message": "no more", "exit_code": 2, "repairable": False}
    beat = messages[5]
    assert beat["detail"] == "3 of 16"
    assert beat["progress_count"] > generate["progress_count"]
    assert beat["phase_count"] == generate["phase_count"] == messages[0]["phase_count"] + 1


def test_messages_of_many_threads_stay_whole_in_the_pipe():
    read_fd, write_fd = os.pipe()
    heartbeat = Heartbeat(send_to_pipe(write_fd, on_broken=lambda: None))
    threads = [threading.Thread(target=heartbeat.report_error, args=("x" * 9000, n)) for n in range(20)]
    for thread in threads:
        thread.start()
    with open(read_fd, "rb") as reader:
        received = [json.loads(reader.readline()) for _ in threads]
    for thread in threads:
        thread.join()
    os.close(write_fd)
    assert sorted(message["exit_code"] for message in received) == list(range(20))
    assert all(len(message["message"]) == 9000 for message in received)


def test_a_reader_that_is_gone_is_noticed():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    noticed: list[bool] = []
    Heartbeat(send_to_pipe(write_fd, on_broken=lambda: noticed.append(True))).set_phase("train")
    os.close(write_fd)
    assert noticed == [True]
