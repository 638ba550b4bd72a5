"""imgsum with another number of workers, which is not an option of the command: workers.py N ALGORITHM IMAGE."""

from __future__ import annotations

import sys

from imgsum.engine.checksum import Task, checksum_tasks
from imgsum.errors import Error
from imgsum.hash import blkhash
from imgsum.source import OpenOptions


def main() -> None:
    """Print the checksum as imgsum does."""
    workers, algorithm, image = sys.argv[1:]
    construction = blkhash.construction("blkhash", algorithm, None)
    for result in checksum_tasks([Task(image, construction, OpenOptions())], OpenOptions(), workers=int(workers)):
        if isinstance(result, Error):
            sys.exit(str(result))
        print(f"{result.hexdigest}  {result.name}")


if __name__ == "__main__":
    main()
