/* An NVTX injection library: writes every push, pop, start, end and mark to a file.
 *
 * NVTX loads the library that NVTX_INJECTION64_PATH names at its first call, as it would load Nsight
 * Systems, and hands it the table of its functions (nvtxTypes.h of NVTX 3, whose numbers are below).
 * A line is: nanoseconds of CLOCK_MONOTONIC, thread, what, text. The file is NVTX_LOG and the
 * process's number. Compile with `gcc -shared -fPIC`. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CALLBACKS = 1, CORE = 1, MARK = 2, START = 5, END = 7, PUSH = 9, POP = 11 };

typedef void (*function)(void);
typedef struct {
    size_t size;
    int (*functions_of)(int module, function ***table, unsigned *count);
} callbacks;

static FILE *out;
static unsigned long started;

static void write_line(const char *what, unsigned long number, const char *text)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    fprintf(out, "%lld %ld %s %lu %s\n", now.tv_sec * 1000000000LL + now.tv_nsec,
            (long)syscall(SYS_gettid), what, number, text);
}

static void mark(const char *text) { write_line("mark", 0, text); }

static int push(const char *text)
{
    write_line("push", 0, text);
    return 0;
}

static int pop(void)
{
    write_line("pop", 0, "");
    return 0;
}

static unsigned long start(const char *text)
{
    unsigned long number = __sync_add_and_fetch(&started, 1);
    write_line("start", number, text);
    return number;
}

static void end(unsigned long number) { write_line("end", number, ""); }

int InitializeInjectionNvtx2(const void *(*table_of)(unsigned))
{
    const callbacks *exported = table_of(CALLBACKS);
    function **table;
    unsigned count;
    char name[4096];
    if (exported == NULL || !exported->functions_of(CORE, &table, &count) || count <= POP)
        return 0;
    snprintf(name, sizeof name, "%s.%d", getenv("NVTX_LOG"), (int)getpid());
    out = fopen(name, "w");
    if (out == NULL)
        return 0;
    setvbuf(out, NULL, _IOLBF, 1 << 16); /* a rank may end without closing its files */
    *table[MARK] = (function)mark;
    *table[START] = (function)start;
    *table[END] = (function)end;
    *table[PUSH] = (function)push;
    *table[POP] = (function)pop;
    return 1;
}
