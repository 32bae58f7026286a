"""`code`: 1.0 when the program in the response passes all tests, in a sandbox, else 0.0."""

from __future__ import annotations

import json
from typing import Any

from miles.errors import RewardError
from miles.rollout.rm_hub.grader import Grader, Reward
from miles.rollout.rm_hub.math_answer import after_thinking
from miles.rollout.rm_hub.pattern_reward import fenced_blocks
from miles.types import Sample

SANDBOX = "miles.rollout.rm_hub.sandbox.tasks"
POOL_MARGIN_S = 10.0  # the worker watches the time itself; the pool only where the worker is lost
_LANGUAGES = ("", "python", "py", "python3")


class CodeGrader(Grader):
    """The tests are a mapping in `metadata["tests"]`, else in the label, as such or as JSON text:

    - `inputs` and `outputs`: what the program reads and must print;
    - the same with `fn_name`: arguments (a list for each call) and results, with `tolerance` for numbers;
    - `tests`: Python code, or a list of such lines, that must come to its end; `entry_point` is the name that
      `check(candidate)` gets.
    """

    place = "the last fenced block of Python after the thinking part"
    missing = 0.0

    def start(self) -> None:
        self._pool()

    def probe(self) -> None:
        problem = self._pool().submit(("probe", "", POOL_MARGIN_S)).result()
        reason = problem.value or problem.detail
        if reason:
            raise RewardError(
                f"--rm-type code: no sandbox can be built on this machine ({reason}). It needs Linux 5.12 "
                "or newer with unprivileged user namespaces: in a container start it with seccomp and "
                "AppArmor profiles that allow them, on a host set kernel.unprivileged_userns_clone=1 (Debian) or "
                "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), and user.max_user_namespaces "
                "above 0. Programs are never run without it"
            )

    def find(self, response: str) -> str | None:
        blocks = fenced_blocks(after_thinking(response) or "", languages=_LANGUAGES)
        return blocks[-1] if blocks and blocks[-1].strip() else None

    def label_problem(self, label: Any, metadata: dict[str, Any]) -> str | None:
        try:
            read_tests(label, metadata)
        except ValueError as error:
            return f'no tests can be read in it or in metadata["tests"]: {error}'
        return None

    async def compare(self, answer: str, sample: Sample) -> Reward:
        job = {**read_tests(sample.label, sample.metadata), "program": answer}
        timeout_s = self.tools.config.reward.rm_code_timeout
        task = ("tests", json.dumps(job), timeout_s)
        passed = await self.tools.run(
            SANDBOX, task, about=f"sample {sample.index}", timeout_s=timeout_s + POOL_MARGIN_S
        )
        return float(bool(passed))

    def _pool(self) -> Any:
        return self.tools.pools.get(SANDBOX, timeout_s=self.tools.config.reward.rm_code_timeout + POOL_MARGIN_S)


def read_tests(label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The tests in the form that the worker takes. Raises `ValueError` that says what is wrong with them."""
    tests = metadata.get("tests", label)
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if not isinstance(tests, dict):
        raise ValueError(f"expected a mapping, not a {type(tests).__name__}")
    if "tests" in tests:
        return {"tests": _test_code(tests)}
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("expected `inputs` and `outputs`, or `tests`")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; expected as many of both, at least one")
    name = tests.get("fn_name")
    if name is None:
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise ValueError("inputs and outputs of a program must be texts; with `fn_name` they are values")
        if not all(text.strip() for text in outputs):
            raise ValueError("an output is empty, which a program that ends at once would pass")
    elif not isinstance(name, str) or not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("with `fn_name` each input must be the list of the arguments of a call")
    return {"fn_name": name, "inputs": inputs, "outputs": outputs, "tolerance": tests.get("tolerance")}


def _test_code(tests: dict[str, Any]) -> str:
    code = tests["tests"]
    code = "\n".join(map(str, code)) if isinstance(code, list) else str(code)
    if tests.get("entry_point"):
        code += f"\ncheck({tests['entry_point']})\n"
    try:
        compile(code, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the test code is not Python: {error}") from None
    if "assert" not in code:
        raise ValueError("the test code asserts nothing")
    return code
