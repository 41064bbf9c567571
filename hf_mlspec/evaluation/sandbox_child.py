"""How does a process lock itself in, run one generated program and tell how it ended?

This text is started by `python -c`, without site-packages and without hf_mlspec, and reads one JSON object from its
standard input: program, token, report (a descriptor), parent (a process id), filter (BPF, hexadecimal), landlock (its
ABI, 0 where there is none), limits ({"RLIMIT_...": number}). On the descriptor it writes "R" when it is confined, then
the token when the program has run to its end, or a JSON object {"kind", "detail"} that says how it ended.
"""

import collections
import ctypes
import functools
import gc
import json
import operator
import os
import resource
import struct
import sys
import types

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIGKILL, SECCOMP_MODE_FILTER, CAPABILITY_VERSION_3 = 9, 2, 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2  # what root needs to read a Python that lies in another user's folder
# The numbers of Landlock are the same on all machines, that of capset is not.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, CAPSET = 444, 445, 446, {"x86_64": 126, "aarch64": 91}
# LANDLOCK_ACCESS_FS_*: bits 0 (execute) to 14 (truncate) since ABI 3, bit 15 (ioctl of devices) since ABI 5
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/etc/ld.so.cache",
            "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/random", "/dev/zero")
OUT_OF_MEMORY = b'{"kind": "memory", "detail": "MemoryError"}'  # written when there is no memory left to write one
HOLDERS = (functools.partial, list, tuple, type(iter([])))

libc = ctypes.CDLL(None, use_errno=True)


def call(what, function, *arguments):
    """A C function that gives -1 on failure; integers travel as long, because syscall and prctl are variadic."""
    result = function(*(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def confine(order):
    """Limits, no privileges, no writing outside this folder, no other system calls; no way back from any of them."""
    call("PR_SET_PDEATHSIG", libc.prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != order["parent"]:
        raise OSError("the process that asked for this program is gone")
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    drop_privileges()
    if order["landlock"]:
        restrict_files(order["landlock"])
    code = bytes.fromhex(order["filter"])
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text))  # struct sock_fprog
    call("PR_SET_SECCOMP", libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0)


def drop_privileges():
    call("PR_SET_NO_NEW_PRIVS", libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() == 0:
        keep = CAP_DAC_READ_SEARCH & effective_capabilities()
        header, sets = struct.pack("Ii", CAPABILITY_VERSION_3, 0), struct.pack("6I", keep, keep, 0, 0, 0, 0)
        number = CAPSET[os.uname().machine]
        call("capset", libc.syscall, number, ctypes.c_char_p(header), ctypes.c_char_p(sets))


def effective_capabilities():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("CapEff:")).split()[1], 16)


def restrict_files(abi):
    """Landlock: read Python and the system's libraries, write plain files in this folder and /dev/null."""
    handled = (1 << 16) - 1 if abi >= 5 else (1 << 15) - 1
    ruleset = call("landlock_create_ruleset", libc.syscall, CREATE_RULESET, ctypes.c_char_p(struct.pack("Q", handled)),
                   8, 0)
    for path in {*sys.path, os.path.join(sys.base_prefix, "lib"), *READABLE}:
        allow(ruleset, path, READ_FILE | READ_DIR)
    allow(ruleset, os.devnull, READ_FILE | WRITE_FILE)
    allow(ruleset, os.getcwd(), READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | MAKE_REG | REMOVE_FILE)
    call("landlock_restrict_self", libc.syscall, RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def allow(ruleset, path, access):
    if not os.path.exists(path):
        return  # not every system has each of the readable folders
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    access &= -1 if os.path.isdir(path) else OF_FILES
    rule = struct.pack("=Qi", access, beneath)  # struct landlock_path_beneath_attr, packed
    call(f"landlock_add_rule of {path}", libc.syscall, ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0)
    os.close(beneath)


def steps(program, report, token):
    """An iterator of two steps: the program runs, and if it came to its end, the token is written.

    Consumed in C, it leaves the token in no Python frame above the program, and gc does not know of what leads to it.
    Whatever is raised ends it, StopIteration too: one `map` over both steps, for a chain of two would go on.
    """
    module = types.ModuleType("program")  # not __main__: as in the tests of HumanEval, such blocks do not run
    sys.modules["program"] = sys.modules["__main__"] = module
    code = compile(program, "<program>", "exec", dont_inherit=True)
    both = [functools.partial(exec, code, vars(module)), functools.partial(os.write, report, token)]
    calls = map(operator.methodcaller("__call__"), both)
    del both
    forget(calls)
    gc.freeze()
    return calls


def forget(calls):
    """Take an iterator and what leads from it to the token off the lists of gc, of which a program can get a second
    module; and keep them for ever, because not all types can be freed when they are on no list."""
    untrack, keep = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.Py_IncRef
    untrack.argtypes = keep.argtypes = [ctypes.py_object]
    untrack.restype = keep.restype = None
    left = [calls]
    while left:
        found = left.pop()
        left += [held for held in gc.get_referents(found) if isinstance(held, HOLDERS)]
        keep(found)
        untrack(found)


def ending(error):
    """JSON of how the program ended; its own exception classes may run code here, which no longer can change much."""
    try:
        names = {AssertionError: "failed", MemoryError: "memory", SystemExit: "exit"}
        kind = next((word for cls, word in names.items() if isinstance(error, cls)), "error")
        if isinstance(error, SyntaxError) or last_line(error) is None:
            kind = "memory" if kind == "memory" else "syntax"  # it was never begun
        where = f", line {last_line(error)}" if last_line(error) else ""
        detail = f"{type(error).__name__}: {error}"[:500] + where
        return json.dumps({"kind": kind, "detail": detail}).encode()
    except BaseException:  # a program may make its own __str__ fail, or leave no memory
        return OUT_OF_MEMORY if isinstance(error, MemoryError) else b'{"kind": "error", "detail": "no description"}'


def last_line(error):
    """The line of the program that raised, None where none of its lines was running."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def main():
    sys.path[:] = [path for path in sys.path if os.path.isdir(path) and path]
    order = json.loads(sys.stdin.buffer.read())
    report, null = os.dup(order["report"]), os.open(os.devnull, os.O_RDWR)
    os.close(order["report"])  # its number may lie above the limit of descriptors, as many as the caller has open
    confine(order)
    for descriptor in (0, 1, 2):  # not before: what goes wrong until here is told on standard error
        os.dup2(null, descriptor)
    os.write(report, b"R")
    try:
        results = collections.deque(steps(order.pop("program"), report, order.pop("token").encode()))
        if not results:  # map takes a StopIteration of the program for its own end
            os.write(report, b'{"kind": "error", "detail": "StopIteration"}')
    except BaseException as error:
        os.write(report, ending(error))
    os._exit(0)


main()
