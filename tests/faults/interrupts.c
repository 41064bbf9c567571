/* At which bytecode does an interrupt (SIGINT) come? Counts the bytecodes of frames whose file has a text in its name, and at
   one of them marks the signal as arrived: the interpreter then raises at the next place where it looks for signals. */
#include <Python.h>
#include <string.h>

static const char *wanted;
static long at, seen;

static int trace(PyObject *self, PyFrameObject *frame, int what, PyObject *given) {
  if (what == PyTrace_OPCODE) {
    if (++seen == at) PyErr_SetInterrupt();
  } else if (what == PyTrace_CALL) {
    PyObject *code = (PyObject *)PyFrame_GetCode(frame), *name = PyObject_GetAttrString(code, "co_filename");
    const char *text = name ? PyUnicode_AsUTF8(name) : NULL;
    if (text && strstr(text, wanted)) PyObject_SetAttrString((PyObject *)frame, "f_trace_opcodes", Py_True);
    PyErr_Clear();
    Py_XDECREF(name);
    Py_DECREF(code);
  }
  return 0;
}

/* count: the bytecode at which it arrives, from 1; 0: none. text: of file names; it is kept. */
void begin(long count, const char *text) {
  at = count, seen = 0, wanted = text;
  PyEval_SetTrace(trace, NULL);
}

/* How many there were. */
long end(void) {
  PyEval_SetTrace(NULL, NULL);
  return seen;
}
