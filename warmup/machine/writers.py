"""Tells who besides this user can write to a file or folder, by its mode, its group and the group's members."""

import os
import stat


def other_writers(status: os.stat_result) -> str:
    """Names the other users that the mode of a file or folder lets write to it, such as "everybody"; empty if there
    are none.

    A group that has no member but this user does not count. Kubernetes makes a volume writable by such a group, the
    Pod's ``fsGroup``, whenever it mounts the volume.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    if status.st_gid not in (os.getegid(), *os.getgroups()):
        return f"group {status.st_gid}"
    others = _others_in(status.st_gid)
    return f"group {status.st_gid} ({', '.join(sorted(others)[:3])})" if others else ""


def _others_in(group: int) -> set[str]:
    """The names of a group's members that this system knows, without this user and root."""
    import grp  # noqa: PLC0415 - of few starts, as these ask the system's databases
    import pwd  # noqa: PLC0415

    try:
        named = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        named = set()
    ours = (os.geteuid(), 0)
    users = pwd.getpwall()
    primary = {user.pw_name for user in users if user.pw_gid == group and user.pw_uid not in ours}
    return primary | (named - {user.pw_name for user in users if user.pw_uid in ours})
