"""The process that runs cases: ``python -m fuzz.worker PARTS_FOLDER PART SEED READ_FD WRITE_FD``.

Requests and answers are lines of JSON on two pipes; the cases' own output goes elsewhere. A request names a case by its
index and its path of simplifications; the answers are a limit, once the case is made, and the outcome. A request for
the script returns its text. The reader of the answers detects a missing one.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from . import case as cases


def main(folder: str, name: str, seed: str, read_fd: str, write_fd: str) -> None:
    requests, answers = os.fdopen(int(read_fd)), os.fdopen(int(write_fd), "w", buffering=1)
    for pipe in (requests, answers):
        os.set_inheritable(pipe.fileno(), False)

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")

    part = cases.load(name, Path(folder))
    why_not = cases.why_not(part)
    answer(ready=not why_not, why_not=why_not)
    for line in requests:
        request = json.loads(line)
        made = False
        try:
            case = cases.find(part, int(seed), request["index"], request["path"])
            if case is None:
                answer(kind="absent")
                continue
            if request["script"]:
                answer(script=case.script())
                continue
            made = True
            answer(limit=case.limit)
            case.run()
            answer(kind="passed")
        except cases.Failure as failure:
            answer(kind="failed", words=str(failure))
        except Exception as error:
            words = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            answer(kind="failed" if made else "unmade", words=words)


if __name__ == "__main__":
    main(*sys.argv[1:])
