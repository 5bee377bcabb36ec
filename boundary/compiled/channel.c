/* Collectives among the processes of one machine, through memory that they share.

   Every rank has two slots in the segment and writes only there. A collective takes one step or several; in a step
   each rank copies what it sends into one of its slots, publishes the step's number, waits until every other rank
   has published it, and reads the others' slots. The slots take turns: that a rank has published a step says that it
   has finished reading the step before, so what a rank writes next is read by nobody any more. There is no other
   synchronization, and a step costs one flag per rank.

   With the first step of a collective a rank posts what it sends to each rank, as a token. A receiver compares it
   with the token of what it expects, so ranks at different collectives read none of each other's values.

   A wait spins, then gives its core away, then sleeps on the flag; a rank that waits for one on its own core moves to a
   core with fewer of the channel's ranks, for which its thread's affinity is another one for a moment. A wait ends at
   the latest after the time it was given, and the caller calls again to go on; and it ends when the socket that ties
   this rank to the awaited one is closed, which happens when that process ends, however it ends. */
#define _GNU_SOURCE
#include "rows.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 64
#define TEXT 256
#define FIRST_STEP (UINT32_MAX - 500) /* so that passing the last number is nothing that happens only after days */
#define NAP 10000000L /* ns: how long a sleeping rank is unaware of a peer's death */
#define SPINS 500
#define CROWDED_SPINS 25
#define YIELDS 1000 /* each is quick where nobody else wants the core */
#define PATIENT 8   /* waits for a rank on the same core, of which one moves away */

enum { DONE, AGAIN, CLOSED, MISMATCH, NO_MEMORY };

typedef struct {
    _Atomic uint32_t step;     /* the last step this rank has published */
    _Atomic uint32_t sleepers; /* how many ranks sleep until it changes */
    _Atomic int32_t core;      /* where this rank ran when it published; -1 before */
    char padding[116];         /* a flag has its cache lines to itself */
} flag_t;

typedef struct {
    uint64_t steps;             /* how many steps this rank needs */
    uint64_t dealt;             /* its slot holds one part for each rank, instead of one thing for all */
    uint64_t tokens[MAX_RANKS]; /* what it sends to each; 0 for nothing */
    char text[TEXT];
} post_t;

typedef struct {
    int rank, size, spins;
    unsigned blocked; /* waits for a rank on the same core */
    int64_t window;   /* bytes of a slot */
    char *base;
    size_t bytes;
    flag_t *flags;
    post_t *posts;
    char *slots;
    int links[MAX_RANKS]; /* a socket to each peer */
    uint32_t step;        /* the last one this rank has published */
    int published;        /* ... and has not finished */
    uint64_t done;        /* steps of the present collective that are done */
    uint64_t steps;       /* ... and that it takes */
    char dealt[MAX_RANKS]; /* what each rank posted for it */
    int peer;             /* whom the last failure concerns */
} channel_t;

/* What one rank wants of a collective. Arrays have one entry per rank. */
typedef struct {
    const char *text;
    int64_t unit;             /* bytes that are not divided between steps */
    int dealt;                /* `send` differs between ranks */
    const char *const *send;  /* null for nothing */
    const int64_t *send_bytes;
    const int64_t *receive_bytes;
    const uint64_t *send_tokens;
    const uint64_t *receive_tokens;
} call_t;

static size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static size_t head_bytes(int size) { return aligned(size * sizeof(flag_t) + 2 * size * sizeof(post_t)); }

EXPORTED int64_t segment_bytes(int size, int64_t window) {
    return (int64_t)(head_bytes(size) + 2 * (size_t)size * aligned((size_t)window));
}

EXPORTED int max_ranks(void) { return MAX_RANKS; }

/* This rank's end of the segment behind `descriptor`, which is zero before rank 0 opens it, before all others; null if
   it cannot be mapped. `links` must stay open. */
EXPORTED channel_t *channel_open(int descriptor, int rank, int size, int64_t window, const int *links) {
    channel_t *channel = calloc(1, sizeof(channel_t));
    if (!channel) return 0;
    channel->rank = rank;
    channel->size = size;
    channel->window = (int64_t)aligned((size_t)window);
    channel->bytes = (size_t)segment_bytes(size, window);
    channel->base = mmap(0, channel->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (channel->base == MAP_FAILED) {
        free(channel);
        return 0;
    }
    channel->flags = (flag_t *)channel->base;
    channel->posts = (post_t *)(channel->base + size * sizeof(flag_t));
    channel->slots = channel->base + head_bytes(size);
    memcpy(channel->links, links, size * sizeof(int));
    channel->step = FIRST_STEP;
    for (int i = 0; !rank && i < size; i++) {
        atomic_store(&channel->flags[i].step, FIRST_STEP);
        atomic_store(&channel->flags[i].core, -1);
    }
    cpu_set_t cores;
    /* Whoever spins where ranks outnumber cores keeps the one it waits for from running. */
    int crowded = sched_getaffinity(0, sizeof cores, &cores) || CPU_COUNT(&cores) < size;
    channel->spins = crowded ? CROWDED_SPINS : SPINS;
    return channel;
}

EXPORTED void channel_close(channel_t *channel) {
    munmap(channel->base, channel->bytes);
    free(channel);
}

EXPORTED int channel_peer(const channel_t *channel) { return channel->peer; }

static post_t *post_of(const channel_t *channel, int rank, uint32_t step) {
    return &channel->posts[2 * rank + (step & 1)];
}

static char *slot_of(const channel_t *channel, int rank, uint32_t step) {
    return channel->slots + (2 * rank + (step & 1)) * channel->window;
}

/* What `rank` posted for the present step. */
EXPORTED const char *channel_text(const channel_t *channel, int rank) {
    return post_of(channel, rank, channel->step)->text;
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_come(const channel_t *channel, int peer) {
    uint32_t step = atomic_load_explicit(&channel->flags[peer].step, memory_order_acquire);
    return (int32_t)(step - channel->step) >= 0;
}

static int is_gone(const channel_t *channel, int peer) {
    struct pollfd link = {channel->links[peer], POLLRDHUP, 0};
    return poll(&link, 1, 0) > 0;
}

/* Sleep until the peer publishes, but not for longer than `nanoseconds`. */
static void sleep_on(channel_t *channel, int peer, int64_t nanoseconds) {
    flag_t *flag = &channel->flags[peer];
    struct timespec time = {nanoseconds / 1000000000L, nanoseconds % 1000000000L};
    /* Either the peer sees that somebody sleeps, or the load here sees its step: both are sequentially consistent. */
    atomic_fetch_add(&flag->sleepers, 1);
    uint32_t step = atomic_load(&flag->step);
    if ((int32_t)(step - channel->step) < 0) syscall(SYS_futex, &flag->step, FUTEX_WAIT, step, &time, 0, 0);
    atomic_fetch_sub(&flag->sleepers, 1);
}

static void publish(channel_t *channel) {
    flag_t *flag = &channel->flags[channel->rank];
    atomic_store_explicit(&flag->core, sched_getcpu(), memory_order_relaxed);
    atomic_store(&flag->step, ++channel->step);
    if (atomic_load(&flag->sleepers)) syscall(SYS_futex, &flag->step, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    channel->published = 1;
}

/* Whether the peer's post is what this rank expects of it. */
static int agrees(channel_t *channel, const call_t *call, int peer) {
    if (channel->done || post_of(channel, peer, channel->step)->tokens[channel->rank] == call->receive_tokens[peer])
        return 1;
    channel->peer = peer;
    return 0;
}

/* What ends a wait early: a peer has come and disagrees, or will not come. */
static int look_around(channel_t *channel, const call_t *call) {
    for (int peer = 0; peer < channel->size; peer++) {
        if (peer == channel->rank) continue;
        /* It may have published and ended, so the order of the two questions matters. */
        if (!has_come(channel, peer) && is_gone(channel, peer) && !has_come(channel, peer)) {
            channel->peer = peer;
            return CLOSED;
        }
        if (has_come(channel, peer) && !agrees(channel, call, peer)) return MISMATCH;
    }
    return DONE;
}

/* Leave the core that the awaited rank needs too, if there is one with fewer of this channel's ranks. Ranks that spin
   and yield on one core would stay there for long though another is idle: none of them looks as if it wanted to move.
   A thread that is pinned to one core stays; where else there is work, other than the channel's, nobody knows. */
static void make_way(channel_t *channel, int peer) {
    int core = sched_getcpu();
    if (core < 0 || core >= CPU_SETSIZE || atomic_load(&channel->flags[peer].core) != core) return;
    if (channel->blocked++ % PATIENT) return;
    cpu_set_t allowed, better;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    unsigned char ranks[CPU_SETSIZE] = {0};
    for (int rank = 0; rank < channel->size; rank++) {
        int there = rank == channel->rank ? core : atomic_load(&channel->flags[rank].core);
        if (0 <= there && there < CPU_SETSIZE) ranks[there]++;
    }
    int fewest = ranks[core] - 2; /* with one less than here, this rank would only make the other core the full one */
    CPU_ZERO(&better);
    for (int other = 0; other < CPU_SETSIZE; other++) {
        if (!CPU_ISSET(other, &allowed) || ranks[other] > fewest) continue;
        if (ranks[other] < fewest) CPU_ZERO(&better);
        fewest = ranks[other];
        CPU_SET(other, &better);
    }
    if (!CPU_COUNT(&better) || sched_setaffinity(0, sizeof better, &better)) return;
    if (sched_setaffinity(0, sizeof allowed, &allowed)) {
        /* The cores that are allowed have changed meanwhile: all that there are, of which the kernel leaves those. */
        memset(&allowed, 0xff, sizeof allowed);
        sched_setaffinity(0, sizeof allowed, &allowed);
    }
    atomic_store(&channel->flags[channel->rank].core, sched_getcpu()); /* or another rank would move as well */
}

/* Wait until every rank has published the present step, and see that they agree. */
static int meet(channel_t *channel, const call_t *call, int64_t until) {
    for (int turn = 1; turn < channel->size; turn++) {
        int peer = (channel->rank + turn) % channel->size;
        if (!has_come(channel, peer)) make_way(channel, peer);
        for (int i = 0; i < channel->spins && !has_come(channel, peer); i++) relax();
        for (int i = 0; i < YIELDS && !has_come(channel, peer); i++) sched_yield();
        while (!has_come(channel, peer)) {
            int status = look_around(channel, call);
            if (status != DONE) return status;
            int64_t left = until - now();
            if (left <= 0) {
                channel->peer = peer;
                return AGAIN;
            }
            sleep_on(channel, peer, left < NAP ? left : NAP);
        }
        if (!agrees(channel, call, peer)) return MISMATCH;
    }
    return DONE;
}

/* How much of a message one step carries. */
static int64_t capacity(const channel_t *channel, int dealt, int64_t unit) {
    int64_t bytes = dealt ? channel->window / channel->size : channel->window;
    return bytes / unit * unit;
}

/* Where the part for `rank` lies in a dealt slot. */
static int64_t part(const channel_t *channel, int rank, int64_t unit) {
    return rank * capacity(channel, 1, unit);
}

static void copy_in(channel_t *channel, const call_t *call) {
    int64_t room = capacity(channel, call->dealt, call->unit);
    int64_t start = (int64_t)channel->done * room;
    char *slot = slot_of(channel, channel->rank, channel->step + 1);
    int64_t longest = 0;
    int copied = 0;
    for (int peer = 0; peer < channel->size; peer++) {
        if (peer == channel->rank || !call->send[peer]) continue;
        int64_t bytes = call->send_bytes[peer];
        if (bytes > longest) longest = bytes;
        int64_t here = bytes - start < room ? bytes - start : room;
        if (here <= 0 || (copied && !call->dealt)) continue;
        memcpy(slot + (call->dealt ? part(channel, peer, call->unit) : 0), call->send[peer] + start, (size_t)here);
        copied = 1;
    }
    if (channel->done) return;
    post_t *post = post_of(channel, channel->rank, channel->step + 1);
    post->steps = (uint64_t)((longest + room - 1) / room);
    post->dealt = (uint64_t)call->dealt;
    memcpy(post->tokens, call->send_tokens, channel->size * sizeof(uint64_t));
    strncpy(post->text, call->text, TEXT - 1);
}

/* Handles what a step brings: of each rank's message the `bytes[rank]` at `pieces[rank]`, which start at
   `starts[rank]` of it. This rank's own piece is null. */
typedef void (*consume_t)(void *context, const char *const *pieces, const int64_t *starts, const int64_t *bytes);

/* Run a collective, or go on with it where the last call returned AGAIN. */
static int run(channel_t *channel, const call_t *call, consume_t consume, void *context, int64_t nanoseconds) {
    int64_t until = now() + nanoseconds;
    do {
        if (!channel->published) {
            copy_in(channel, call);
            publish(channel);
        }
        int status = meet(channel, call, until);
        if (status != DONE) return status;
        if (!channel->done) {
            channel->steps = 1;
            for (int rank = 0; rank < channel->size; rank++) {
                const post_t *post = post_of(channel, rank, channel->step);
                channel->dealt[rank] = (char)post->dealt;
                if (post->steps > channel->steps) channel->steps = post->steps;
            }
        }
        const char *pieces[MAX_RANKS] = {0};
        int64_t starts[MAX_RANKS] = {0}, bytes[MAX_RANKS] = {0};
        for (int rank = 0; rank < channel->size; rank++) {
            int64_t room = capacity(channel, channel->dealt[rank], call->unit);
            starts[rank] = (int64_t)channel->done * room;
            int64_t left = call->receive_tokens[rank] ? call->receive_bytes[rank] - starts[rank] : 0;
            bytes[rank] = left < 0 ? 0 : left < room ? left : room;
            if (rank != channel->rank)
                pieces[rank] = slot_of(channel, rank, channel->step) +
                               (channel->dealt[rank] ? part(channel, channel->rank, call->unit) : 0);
        }
        consume(context, pieces, starts, bytes);
        channel->published = 0;
        channel->done++;
    } while (channel->done < channel->steps);
    channel->done = 0;
    return DONE;
}

typedef struct {
    int rank, size;
    char *const *receive;
} receipt_t;

static void receive_pieces(void *context, const char *const *pieces, const int64_t *starts, const int64_t *bytes) {
    const receipt_t *receipt = context;
    for (int rank = 0; rank < receipt->size; rank++)
        if (rank != receipt->rank && bytes[rank])
            memcpy(receipt->receive[rank] + starts[rank], pieces[rank], (size_t)bytes[rank]);
}

/* Send to each rank, and receive from each. Arrays have one entry per rank, this rank's own included, which is null
   and 0. A message has a token, equal on both ends; without one there is no message. Every rank of the channel calls,
   with `dealt` if its messages are not all the same. */
EXPORTED int exchange(channel_t *channel, const char *text, int dealt, const char *const *send,
                      const int64_t *send_bytes, const uint64_t *send_tokens, char *const *receive,
                      const int64_t *receive_bytes, const uint64_t *receive_tokens, int64_t nanoseconds) {
    call_t call = {text, 64, dealt, send, send_bytes, receive_bytes, send_tokens, receive_tokens};
    receipt_t receipt = {channel->rank, channel->size, receive};
    return run(channel, &call, receive_pieces, &receipt, nanoseconds);
}

/* A run of bytes that every row of a rank's piece has from `from` on, and a row of the whole from `to` on. */
typedef struct {
    int64_t rank, from, to, bytes;
} run_t;

/* A whole of `rows` rows, `stride` bytes each, of which each rank's piece has as many, `row_bytes` long. Every field
   has eight bytes: see shared_memory.py. */
typedef struct {
    const char *text;
    uint64_t token;
    const char *piece;
    char *whole;
    int64_t rows, stride;
    const int64_t *row_bytes;
    const run_t *runs;
    int64_t num_runs;
} gather_t;

_Static_assert(sizeof(gather_t) == 9 * 8, "shared_memory.py packs nine fields of eight bytes");

typedef struct {
    int rank, size;
    const gather_t *gather;
} gathering_t;

/* Where a piece's bytes from `start` to `end` belong, which are at `from`. */
static void place(const gather_t *gather, int rank, const char *from, int64_t start, int64_t end) {
    int64_t row_bytes = gather->row_bytes[rank];
    for (int64_t row = start / row_bytes; row * row_bytes < end; row++)
        for (int64_t i = 0; i < gather->num_runs; i++) {
            const run_t *run = &gather->runs[i];
            if (run->rank != rank) continue;
            int64_t first = row * row_bytes + run->from, last = first + run->bytes;
            char *to = gather->whole + row * gather->stride + run->to;
            if (first < start) to += start - first, first = start;
            if (last > end) last = end;
            const char *here = from + (first - start);
            /* This rank's own piece may lie in its place already. */
            if (first < last && to != here) memcpy(to, here, (size_t)(last - first));
        }
}

static void place_pieces(void *context, const char *const *pieces, const int64_t *starts, const int64_t *bytes) {
    const gathering_t *gathering = context;
    for (int rank = 0; rank < gathering->size; rank++) {
        if (!bytes[rank]) continue;
        const char *from = rank == gathering->rank ? gathering->gather->piece + starts[rank] : pieces[rank];
        place(gathering->gather, rank, from, starts[rank], starts[rank] + bytes[rank]);
    }
}

/* Put every rank's piece into a whole of this rank's own. */
EXPORTED int gather(channel_t *channel, const gather_t *gather, int64_t nanoseconds) {
    const char *send[MAX_RANKS];
    int64_t send_bytes[MAX_RANKS], receive_bytes[MAX_RANKS];
    uint64_t tokens[MAX_RANKS];
    for (int rank = 0; rank < channel->size; rank++) {
        send[rank] = gather->piece;
        send_bytes[rank] = gather->rows * gather->row_bytes[channel->rank];
        receive_bytes[rank] = gather->rows * gather->row_bytes[rank];
        tokens[rank] = gather->token;
    }
    call_t call = {gather->text, 64, 0, send, send_bytes, receive_bytes, tokens, tokens};
    gathering_t gathering = {channel->rank, channel->size, gather};
    return run(channel, &call, place_pieces, &gathering, nanoseconds);
}

typedef struct {
    int rank, size, dtype;
    const char *own; /* this rank's term of what it keeps */
    int64_t width;   /* elements of a row */
    char *total, *normed;
    const char *residual;
    int64_t residual_stride;
    const quantized_t *quantized;
    const norm_t *norm;
    void *scratch;
} reduction_t;

static void reduce_pieces(void *context, const char *const *pieces, const int64_t *starts, const int64_t *bytes) {
    const reduction_t *reduction = context;
    int64_t size = dtype_size(reduction->dtype), start = starts[reduction->rank], count = bytes[reduction->rank] / size;
    const void *terms[MAX_RANKS];
    int64_t strides[MAX_RANKS];
    for (int rank = 0; rank < reduction->size; rank++) {
        terms[rank] = rank == reduction->rank ? reduction->own + start : pieces[rank];
        strides[rank] = reduction->width;
    }
    char *total = reduction->total ? reduction->total + start : 0;
    if (!reduction->scratch) {
        vector_sum(terms, reduction->size, total, count, reduction->dtype);
        return;
    }
    int64_t first = start / size / reduction->width;
    quantized_t quantized;
    if (reduction->quantized) {
        quantized = *reduction->quantized;
        quantized.rows += first * reduction->width;
        if (quantized.scales) quantized.scales += first;
    }
    rows_t rows = {
        .count = count / reduction->width,
        .width = reduction->width,
        .terms = terms,
        .term_strides = strides,
        .num_terms = reduction->size,
        .residual = reduction->residual ? reduction->residual + first * reduction->residual_stride * size : 0,
        .residual_stride = reduction->residual_stride,
        .total = total,
        .normed = reduction->normed ? reduction->normed + start : 0,
        .quantized = reduction->quantized ? &quantized : 0,
    };
    rows_run(&rows, reduction->dtype, reduction->norm, reduction->scratch);
}

/* The bytes of the longest row that `reduce` takes together with a residual. */
EXPORTED int64_t longest_row(const channel_t *channel) { return channel->window / channel->size; }

/* What is summed. With `counts`, one per rank, this rank keeps so many elements as its entry says, those after the lower
   ranks'; without, all `count`. With `width`, what is kept are rows of so many elements, to which `residual` is added,
   and of which `normed` or `quantized` takes the norm; these, `total` and `residual` may then be null, and no row
   crosses a boundary of `counts`. Every field has eight bytes: see shared_memory.py. */
typedef struct {
    const char *text;
    uint64_t token;
    int64_t dtype;
    const char *term;
    int64_t count;
    const int64_t *counts;
    char *total;
    int64_t width;
    const char *residual;
    int64_t residual_stride;
    char *normed;
    const quantized_t *quantized;
    const norm_t *norm;
} sum_t;

_Static_assert(sizeof(sum_t) == 13 * 8, "shared_memory.py packs thirteen fields of eight bytes");

/* Sum the ranks' terms in rank order. */
EXPORTED int reduce(channel_t *channel, const sum_t *sum, int64_t nanoseconds) {
    int dtype = (int)sum->dtype;
    int64_t size = dtype_size(dtype), unit = sum->width ? sum->width * size : 64;
    const char *send[MAX_RANKS];
    int64_t send_bytes[MAX_RANKS], receive_bytes[MAX_RANKS];
    uint64_t tokens[MAX_RANKS];
    const char *place = sum->term, *own = place;
    for (int rank = 0; rank < channel->size; rank++) {
        send[rank] = place;
        send_bytes[rank] = (sum->counts ? sum->counts[rank] : sum->count) * size;
        receive_bytes[rank] = (sum->counts ? sum->counts[channel->rank] : sum->count) * size;
        tokens[rank] = sum->token;
        if (rank == channel->rank) own = place;
        if (sum->counts) place += send_bytes[rank];
    }
    call_t call = {sum->text, unit, sum->counts != 0, send, send_bytes, receive_bytes, tokens, tokens};
    reduction_t reduction = {
        channel->rank, channel->size, dtype, own, sum->width, sum->total, sum->normed, sum->residual,
        sum->residual_stride, sum->quantized, sum->norm, 0,
    };
    if (sum->width && !(reduction.scratch = rows_scratch(dtype, sum->width, sum->norm))) return NO_MEMORY;
    int status = run(channel, &call, reduce_pieces, &reduction, nanoseconds);
    free(reduction.scratch);
    return status;
}
