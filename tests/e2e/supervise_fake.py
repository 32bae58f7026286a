"""What `miles train` does, with a fake loop.

python supervise_fake.py FOLDER FUNCTION HEARTBEAT_TIMEOUT DEADLINES [SETTINGS] [in-process]
"""

import json
import sys

from miles.config.flags import with_values
from miles.config.resolve import resolve
from miles.config.sections import RunConfig
from miles.loop.in_process import run_in_process
from miles.loop.run_folder import open_run_folder
from miles.loop.supervisor import supervise


def main() -> int:
    runs_dir, function, timeout, deadlines, *in_process = sys.argv[1:]
    values = {"runs_dir": runs_dir, "run_name": "run", "heartbeat_timeout": float(timeout)}
    values |= {"phase_deadlines": json.loads(deadlines)}
    if in_process and in_process[0].startswith("{"):
        values |= json.loads(in_process.pop(0))
    config, _ = resolve(with_values(RunConfig(), values))
    folder = open_run_folder(config, command=sys.argv)
    train = f"tests.e2e.fake_train.{function}"
    if in_process:
        return run_in_process(config, folder, train=train, resume_command="miles train --again")
    return supervise(folder, config.process, train=train, resume_command="miles train --again")


if __name__ == "__main__":
    sys.exit(main())
