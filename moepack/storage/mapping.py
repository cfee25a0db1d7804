"""Files mapped into memory, and file systems that map none: 9p's and FUSE's may refuse."""

import errno
import mmap

_REFUSALS = {errno.ENODEV, errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS}


def map_file(descriptor: int) -> mmap.mmap | None:
    """Map a whole file that is not empty, read-only; None if its file system maps no files.

    Raises OSError if the machine lacks memory for it.
    """
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno in _REFUSALS:
            return None
        raise
