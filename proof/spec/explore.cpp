// Explores Fencelock.tla's states, some hundred times faster than TLC: the same actions under the same names,
// one function each, in the same order. What differs is bookkeeping that cannot matter:
//  - instead of numbers of incarnations, one bit: whether a run_id is the server's present one;
//  - instead of a list's fingerprint, the operator who made it up (the first of those who agree);
//  - servers of the same lists are interchangeable, so are recoverers: only one of each set of permutations is kept;
//  - a ticket that is void for good is forgotten.
// States are remembered by 64 bits of hash; the chance that one was taken for another is printed.
// Usage: explore key=value …   (see check.py, which holds the configurations)
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Small states are fast states: check.py compiles for each shape.
#ifndef SHAPE
#define SHAPE 7, MAX_ACQS = 4, MAX_RECS = 3, MAX_OPS = 2
#endif
constexpr int MAX_NODES = SHAPE;
constexpr u8 NONE = 9, DEAD = 63;  // no fingerprint; a ticket that nobody can use any more
enum Phase : u8 { IDLE, BEGIN, READ, CHOSEN, PROMISED, CLOSE, CHECK, OPEN, PROMISED_OPEN };
enum Kind : u8 { RECOVER, FINISH, RISE };

struct Disk {
    u8 adm, live, cfg, nxt, e, p, c, lka, lke, lkg, lkm, tk, tlive;
};
struct Column {  // all that concerns one server: sorting columns is exact symmetry reduction
    Disk disk, snap;
    u8 out, ever, again, doubled;
    u8 rec_tk[MAX_RECS], rec_same[MAX_RECS], rec_rd[MAX_RECS], rec_ack[MAX_RECS], rec_ok[MAX_RECS], rec_up[MAX_RECS];
    u8 op_tk[MAX_OPS], op_same[MAX_OPS], op_q1[MAX_OPS], op_q2[MAX_OPS], op_ack[MAX_OPS], op_ok[MAX_OPS];
    u32 votes[MAX_ACQS], acks[MAX_ACQS];  // bit 8e + g - 1
};
struct Acq { u8 begun, done, cfg, fe, fg, te, tg, at, v; };  // v: the write id that was loaded, which is a number here
struct Rec { u8 ph, all, cfg, mx, mc, e, kind; };
struct Op { u8 ph, l, old, f, mx, e; };
struct State {
    Column node[MAX_NODES];
    Acq acq[MAX_ACQS];
    Rec rec[MAX_RECS];
    Op op[MAX_OPS];
    u16 raises;  // bit 4 * fingerprint + epoch
    u8 fe, fg, writes, stale, lost, ge, gg, gv, lose, roll, restart;  // ge, gg, gv: token and loaded id of a COMMIT in doubt
};

static int N, A, K, O, MAXG, MAXE, SPARE = -1;  // SPARE: a server in no list, until it is somebody's double
static int lists[4], n_lists;
static bool hint, remint, restore_, guard, all_restarted, init_, only_outcome, unpromised, stray, once, descending, double_, finish, rise, reload, unclaimed, doubt;
static bool mixed_epochs, no_ownership, no_own_limit, no_write_back, restore_early, no_claim, no_guard, no_loaded, no_row_lock, client_ticket,
    ticket_unbound, closed_read, read_begin, no_promise_field, no_epoch, raise_first, admit_first, admit_lowers_p, no_ticket, no_next,
    one_pass, open_unpromised, ticket_apart, fixed_ids, no_past, any_incarnation, any_memory, init_unordered, init_one_look, admit_unraised, all_unraised, raise_double, finish_unpromised, one_look;

static bool in(int list, int n) { return lists[list] >> n & 1; }
static int size(int list) { return __builtin_popcount(lists[list]); }
static int majority(int list) { return size(list) / 2 + 1; }
static bool below(int e1, int g1, int e2, int g2) { return e1 < e2 || (e1 == e2 && g1 < g2); }

struct Explorer {
    // A new state is announced by emit(state, action, two indexes).
    template <class Emit> static void successors(const State& s, Emit emit);
};

static int list_of(const State& s, int f) { return f == 0 ? 0 : s.op[f - 1].l; }
static bool member_of(const State& s, int f, int n) { return in(list_of(s, f), n); }
static int quorum(const State& s, int f) { return majority(list_of(s, f)); }

// A new node's id is the ticket under which it was opened; one that stays keeps its id.
static int id_of(const State& s, int f, int n) {
    if (fixed_ids || f == 0 || !member_of(s, f, n)) return 0;
    return s.node[n].op_tk[f - 1] ? s.node[n].op_tk[f - 1] : init_ ? 0 : id_of(s, s.op[f - 1].old, n);
}

static bool same_list(const State& s, int f, int g) {
    bool same = list_of(s, f) == list_of(s, g);
    for (int n = 0; n < N; n++) same = same && id_of(s, f, n) == id_of(s, g, n);
    return same && (no_past || (f && g && s.op[f - 1].old == s.op[g - 1].old));
}

static int fingerprint(const State& s, int o) {
    if (!init_ && same_list(s, o + 1, 0)) return 0;
    for (int q = 0; q < O; q++)
        if (q != o && s.op[q].f == q + 1 && s.op[q].ph > BEGIN && same_list(s, q + 1, o + 1)) return q + 1;
    return o + 1;
}

static bool admitted(const Disk& d) { return d.adm && d.live; }
static bool member(const Disk& d, int f) { return admitted(d) && d.cfg == f; }
static bool voting(const Disk& d, int f) { return member(d, f) && d.nxt == NONE; }
static bool is_open(const Disk& d) { return d.nxt == NONE || closed_read; }
static bool has_ticket(const Disk& d) { return d.tk && d.tlive; }
static bool holds(const Disk& d, int t) { return t && d.tk == t && (d.tlive || ticket_unbound); }
static int epoch_seen(const Disk& d) { return no_promise_field ? d.e : std::max(d.e, d.p); }

static void ticket(State& t, int n, int mine) {
    Disk& d = t.node[n].disk;
    if (has_ticket(d)) return;
    int id = mine;
    if (!client_ticket) {
        u64 used = 1;
        for (int m = 0; m < N; m++) {
            used |= 1ull << t.node[m].disk.tk | 1ull << t.node[m].snap.tk;
            for (int k = 0; k < K; k++) used |= 1ull << t.node[m].rec_tk[k];
            for (int o = 0; o < O; o++) used |= 1ull << t.node[m].op_tk[o];
        }
        id = __builtin_ctzll(~used);
    }
    d.tk = id, d.tlive = 1;
}

static Disk blank() {
    Disk d;
    memset(&d, 0, sizeof d);
    d.cfg = d.nxt = NONE;
    return d;
}

struct Votes {
    const State& s;
    int a, q;
    u32 told(int n, bool with_acks) const { return s.node[n].votes[a] | (with_acks ? s.node[n].acks[a] : 0); }
    int count(u32 mask, bool with_acks) const {  // a server and its double have one seat
        int c = 0;
        for (int n = 0; n < N; n++) {
            u32 said = told(n, with_acks) | (s.node[n].doubled ? told(SPARE, with_acks) : 0);
            c += n != SPARE && (said & mask) != 0;
        }
        return c;
    }
    u32 heard(bool with_acks) const {
        u32 h = 0;
        for (int n = 0; n < N; n++) h |= told(n, with_acks);
        return h;
    }
    static u32 every_epoch(u32 m) { return m | m << 8 | m << 16 | m << 24; }
    u32 decidable() const {
        u32 result = 0;
        for (u32 h = heard(false); h; h &= h - 1) {
            int b = __builtin_ctz(h), e = b / 8, g = b % 8 + 1;
            u32 low = (1u << g) - 1;
            if (count(mixed_epochs ? every_epoch(low) : low << 8 * e, false) >= q) result |= 1u << b;
        }
        return result;
    }
    u32 standing() const {
        if (no_write_back) return decidable();
        u32 result = 0;
        for (u32 h = heard(true); h; h &= h - 1) {
            int b = __builtin_ctz(h);
            if (count(mixed_epochs ? every_epoch(1u << b % 8) : 1u << b, true) >= q) result |= 1u << b;
        }
        return result;
    }
};

static bool bearable(const State& t) {
    for (int l = 0; l < n_lists; l++) {
        int gone = 0;
        for (int n = 0; n < N; n++) gone += in(l, n) && t.node[n].out;
        if (size(l) && gone >= majority(l)) return false;
    }
    return true;
}

static void voter(Column& col) {
    col.again |= col.disk.e < col.ever;
    col.ever = std::max<int>(col.ever, col.disk.e + 1);
    col.out = 0;
}

static void new_incarnation(State& t, int n) {
    Column& col = t.node[n];
    col.disk.live = col.disk.tlive = 0;
    for (int k = 0; k < K; k++) col.rec_same[k] = 0;
    for (int o = 0; o < O; o++) col.op_same[o] = 0;
}

template <class Emit> static void granting(const State& s, int a, int n, int g, int f, const char* action, Emit emit) {
    if (g > MAXG) return;
    State t = s;
    Disk& d = t.node[n].disk;
    d.c = g, d.lka = a + 1, d.lke = d.e, d.lkg = g, d.lkm = 0;
    Acq& q = t.acq[a];
    if (!q.begun) {
        q.begun = 1, q.cfg = f, q.fe = q.fg = 0;
        for (int b = 0; b < A; b++)
            if (s.acq[b].done && below(q.fe, q.fg, s.acq[b].te, s.acq[b].tg)) q.fe = s.acq[b].te, q.fg = s.acq[b].tg;
    }
    if (!q.done) t.node[n].votes[a] |= 1u << (8 * d.e + g - 1);
    emit(t, action, a + 1, n);
}

template <class Emit> static void grants(const State& s, int a, int n, int f, const char* action, Emit emit) {
    const Disk& d = s.node[n].disk;
    if (!voting(d, f) && !(any_incarnation && d.adm && d.cfg == f && d.nxt == NONE)) return;
    for (int g = d.c + 1; g <= (hint ? MAXG : d.c + 1); g++) granting(s, a, n, g, f, action, emit);
}

// It leads to no state that Release and Grant do not reach.
template <class Emit> static void remints(const State& s, int a, Emit emit) {
    for (int b = 0; b < A; b++) {
        const Acq& held = s.acq[b];
        if (!held.done || a == b || (s.acq[a].begun && s.acq[a].cfg != held.cfg)) continue;
        for (int n = 0; n < N; n++) {
            const Disk& d = s.node[n].disk;
            if (!voting(d, held.cfg)) continue;
            int c = d.e == held.te ? std::max(d.c, held.tg) : d.c;
            granting(s, a, n, c + 1, held.cfg, "Remint", emit);
        }
    }
}

template <class Emit> static void storage(const State& s, Emit emit) {
    bool pending = s.ge || s.gg;  // it holds the row's lock: whoever wants to write waits for its end
    if (pending) {
        State t = s;
        t.fe = s.ge, t.fg = s.gg, t.writes++, t.lost |= s.gv != s.writes, t.ge = t.gg = t.gv = 0;
        emit(t, "GhostCommits", 0, 0);
        t = s;
        t.ge = t.gg = t.gv = 0;
        emit(t, "GhostEnds", 0, 0);
    }
    for (int a = 0; a < A; a++) {
        const Acq& q = s.acq[a];
        bool not_below = !below(q.te, q.tg, s.fe, s.fg);
        bool may_write = q.done && s.writes < 4 && (!pending || no_row_lock);
        if (guard && q.done && (q.at == 0 || q.at == 3) && !no_claim && not_below && !pending) {
            State t = s;
            t.fe = q.te, t.fg = q.tg, t.acq[a].at = 1, t.acq[a].v = 0;
            emit(t, "Claim", a + 1, 0);
        }
        if (guard && q.done && q.at == (no_claim ? 0 : 1)) {
            State t = s;
            t.acq[a].at = 2, t.acq[a].v = s.writes;
            emit(t, "Read", a + 1, 0);
        }
        if (guard && q.at == 2 && may_write && (not_below || no_guard)) {
            State t = s;
            if (not_below) t.fe = q.te, t.fg = q.tg;
            t.writes++, t.stale |= !not_below, t.lost |= q.v != s.writes, t.acq[a].at = no_claim ? 0 : 1;
            emit(t, "Write", a + 1, 0);
        }
        if (unclaimed && (q.at == 0 || q.at == 3)) {
            State t = s;
            t.acq[a].at = 3, t.acq[a].v = s.writes;
            emit(t, "Load", a + 1, 0);
        }
        if (unclaimed && q.at == 3 && may_write && not_below && (q.v == s.writes || no_loaded)) {
            State t = s;
            t.fe = q.te, t.fg = q.tg, t.writes++, t.lost |= q.v != s.writes, t.acq[a].v = t.writes;
            emit(t, "Save", a + 1, 0);
            if (!doubt || pending) continue;
            t = s;
            t.ge = q.te, t.gg = q.tg, t.gv = q.v;
            emit(t, "SaveInDoubt", a + 1, 0);
        }
    }
}

template <class Emit> static void acquisitions(const State& s, const std::vector<int>& known, Emit emit) {
    for (int a = 0; a < A; a++) {
        const Acq& q = s.acq[a];
        if (remint) remints(s, a, emit);
        if (!q.begun) {
            for (int n = 0; n < N; n++)
                for (int f : known) grants(s, a, n, f, "Begin", emit);
            break;
        }
        for (int n = 0; n < N; n++) grants(s, a, n, q.cfg, "Grant", emit);
        Votes votes{s, a, quorum(s, q.cfg)};
        for (u32 h = votes.decidable(); h; h &= h - 1) {  // Confirm
            int b = __builtin_ctz(h), e = b / 8, g = b % 8 + 1;
            for (int n = 0; n < N; n++) {
                const Disk& d = s.node[n].disk;
                bool ours = d.lka == a + 1;
                if (!voting(d, q.cfg) || d.e != e) continue;
                if (!(ours && d.lke == e && !d.lkm) && !no_ownership) continue;
                if (d.lkg > g && !no_own_limit && !(no_ownership && !ours)) continue;
                State t = s;
                t.node[n].disk.c = std::max<int>(d.c, g);
                if (!q.done) t.node[n].acks[a] |= 1u << b;
                emit(t, "Confirm", a + 1, n);
            }
        }
        if (!q.done) {
            for (u32 h = votes.standing(); h; h &= h - 1) {  // Complete
                int b = __builtin_ctz(h), e = b / 8, g = b % 8 + 1;
                State t = s;
                t.acq[a].done = 1, t.acq[a].te = e, t.acq[a].tg = g;
                for (int n = 0; n < N; n++) t.node[n].acks[a] = 0;
                emit(t, "Complete", a + 1, g);
            }
        }
        for (int n = 0; n < N; n++) {
            const Disk& d = s.node[n].disk;
            if (q.done && d.adm && d.cfg == q.cfg && d.e == q.te && d.c < q.tg) {  // Release
                State t = s;
                t.node[n].disk.c = q.tg;
                emit(t, "Release", a + 1, n);
            }
            if (!restore_) continue;
            if (q.done) {  // Restore
                State t = s;
                Disk& u = t.node[n].disk;
                u.lka = a + 1, u.lke = q.te, u.lkg = q.tg, u.lkm = 1;
                emit(t, "Restore", a + 1, n);
            }
            for (u32 h = restore_early && voting(d, q.cfg) ? s.node[n].votes[a] : 0; h; h &= h - 1) {
                int b = __builtin_ctz(h);
                State t = s;
                Disk& u = t.node[n].disk;
                u.lka = a + 1, u.lke = b / 8, u.lkg = b % 8 + 1, u.lkm = 0;
                emit(t, "Restore", a + 1, n);
            }
        }
    }
}

static bool awaits(const State& s, int o, int f, int n) {
    const Disk& d = s.node[n].disk;
    if (!d.adm && holds(d, s.node[n].op_tk[o])) return true;
    return !init_ && member(d, s.op[o].old) && d.nxt == f;
}

static bool readable(const State& s, int k, int n) {
    const Disk& d = s.node[n].disk;
    const Rec& r = s.rec[k];
    if (r.kind == FINISH) return voting(d, r.cfg);
    bool keeps_ticket = r.all && d.adm && d.cfg == r.cfg && !admitted(d) && holds(d, s.node[n].rec_tk[k]);
    return is_open(d) && (member(d, r.cfg) || keeps_ticket);
}

static void rec_begins(State& t, int k, int n) {
    ticket(t, n, k + 1);
    t.node[n].rec_tk[k] = t.node[n].disk.tk;
    t.node[n].rec_same[k] = 1;
}

template <class Emit> static void recovery(const State& s, const std::vector<int>& known, Emit emit) {
    for (int k = 0; k < K; k++) {
        const Rec& r = s.rec[k];
        if (r.ph == IDLE) {
            for (int f : known) {
                if (finish && f) {  // Finish
                    State t = s;
                    t.rec[k].ph = READ, t.rec[k].cfg = f, t.rec[k].kind = FINISH;
                    emit(t, "Finish", k + 1, f);
                }
                for (int e = 1; rise && e <= MAXE; e++) {  // Rise
                    State t = s;
                    t.rec[k].ph = CHOSEN, t.rec[k].cfg = f, t.rec[k].kind = RISE, t.rec[k].e = e;
                    emit(t, "Rise", k + 1, e);
                }
                for (int n = 0; n < N; n++) {
                    const Disk& d = s.node[n].disk;
                    if (!member_of(s, f, n) || admitted(d) || !is_open(d)) continue;
                    for (int all = 0; all <= all_restarted; all++) {
                        State t = s;
                        t.rec[k].ph = BEGIN, t.rec[k].all = all, t.rec[k].cfg = f;
                        rec_begins(t, k, n);
                        emit(t, all ? "RecBegin(all)" : "RecBegin", k + 1, n);
                    }
                }
            }
            break;
        }
        int acks = 0, rds = 0, oks = 0, ups = 0;
        for (int n = 0; n < N; n++) {
            const Column& col = s.node[n];
            acks += col.rec_ack[k] > 0, rds += col.rec_rd[k], oks += col.rec_ok[k], ups += col.rec_up[k];
        }
        bool promised = r.ph == PROMISED || (one_look && acks >= quorum(s, r.cfg));
        int needed = r.all ? all_unraised ? 0 : size(list_of(s, r.cfg)) : quorum(s, r.cfg);
        bool raised = !(double_ || r.kind == FINISH) || ups >= needed || admit_unraised;
        for (int n = 0; n < N; n++) {
            const Column& col = s.node[n];
            const Disk& d = col.disk;
            bool in_list = member_of(s, r.cfg, n);
            if ((r.ph == BEGIN || (read_begin && (r.ph == READ || r.ph == CHOSEN))) && in_list && !col.rec_tk[k] && !admitted(d) &&
                is_open(d) && !col.rec_rd[k]) {
                State t = s;
                rec_begins(t, k, n);
                emit(t, "RecBeginMore", k + 1, n);
            }
            if (col.rec_tk[k] && col.rec_same[k] && !admitted(d) && !has_ticket(d)) {
                State t = s;
                ticket(t, n, k + 1);
                emit(t, "BeginAgain", k + 1, n);
            }
            if ((r.ph == BEGIN || r.ph == READ) && in_list && !col.rec_rd[k] && readable(s, k, n)) {
                State t = s;
                Rec& u = t.rec[k];
                t.node[n].rec_rd[k] = 1;
                u.mx = std::max<int>(u.mx, epoch_seen(d));
                if (no_epoch) u.mc = std::max(u.mc, d.c);
                if (double_ && !member(d, r.cfg)) t.node[n].rec_up[k] = 1;  // it does not vote, so need not be raised
                bool enough = rds + 1 >= (r.all ? size(list_of(s, r.cfg)) : quorum(s, r.cfg));
                u.ph = enough ? CHOSEN : READ;
                u.e = enough ? u.mx + !no_epoch : 0;
                for (int m = 0; enough && !read_begin && m < N; m++) t.node[m].rec_rd[k] = 0, u.mx = 0;
                if (u.e <= MAXE) {
                    emit(t, "RecRead", k + 1, n);
                }
            }
            bool waiting = r.kind == FINISH && in_list && awaits(s, r.cfg - 1, r.cfg, n);
            if (r.kind == FINISH && r.ph == READ && waiting && epoch_seen(d) > r.mx) {
                State t = s;
                t.rec[k].mx = epoch_seen(d);
                emit(t, "FinishLook", k + 1, n);
            }
            if (r.ph != CHOSEN && r.ph != PROMISED) continue;
            if (in_list && (readable(s, k, n) || waiting)) {
                State t = s;
                t.node[n].disk.p = std::max(d.p, r.e);
                if (raise_first && admitted(d) && d.e < r.e) t.node[n].disk.e = r.e, t.node[n].ever = r.e + 1;
                if (!oks && r.ph == CHOSEN) t.node[n].rec_ack[k] = one_look ? 1 : 1 + d.e;
                if (one_look && acks + !col.rec_ack[k] >= quorum(s, r.cfg)) t.raises |= 1u << (4 * r.cfg + r.e);
                emit(t, "RecPromise", k + 1, n);
                bool still = col.rec_ack[k] == 1 + d.e && d.p >= r.e;
                if (acks >= quorum(s, r.cfg) && still && !col.rec_ok[k] && !one_look) {
                    t = s;
                    t.node[n].rec_ok[k] = 1;
                    if (oks + 1 >= quorum(s, r.cfg)) {
                        t.rec[k].ph = PROMISED, t.raises |= 1u << (4 * r.cfg + r.e);
                        for (int m = 0; m < N; m++) t.node[m].rec_ack[k] = t.node[m].rec_ok[k] = 0;
                    }
                    emit(t, "RecStill", k + 1, n);
                }
            }
            if ((double_ || r.kind == FINISH) && r.kind != RISE && promised && in_list && member(d, r.cfg) && is_open(d) && !col.rec_up[k]) {
                State t = s;
                Column& u = t.node[n];
                u.rec_up[k] = 1;
                if (d.e < r.e) u.disk.e = r.e, u.disk.p = std::max(d.p, r.e), u.disk.c = 0, u.ever = r.e + 1;
                emit(t, "RecRaise", k + 1, n);
            }
            if (waiting && ((promised && raised) || finish_unpromised)) {
                State t = s;
                Disk u = blank();
                u.adm = u.live = 1, u.e = r.e, u.p = std::max(r.e, d.p), u.cfg = r.cfg;
                u.lka = d.lka, u.lke = d.lke, u.lkg = d.lkg, u.lkm = d.lkm;
                t.node[n].disk = u;
                voter(t.node[n]);
                t.raises |= 1u << (4 * r.cfg + r.e);
                emit(t, "FinishOpen", k + 1, n);
            }
            if (col.rec_tk[k] && !admitted(d) && (holds(d, col.rec_tk[k]) || no_ticket) && is_open(d) &&
                ((promised && raised) || admit_first || no_epoch)) {
                State t = s;
                Disk u = blank();
                u.adm = u.live = 1, u.e = r.e, u.cfg = r.cfg, u.p = admit_lowers_p ? r.e : std::max(r.e, d.p), u.c = r.mc;
                u.lka = d.lka, u.lke = d.lke, u.lkg = d.lkg, u.lkm = d.lkm;
                t.node[n].disk = u;
                voter(t.node[n]);
                emit(t, "Admit", k + 1, n);
            }
        }
    }
    for (int n = 0; n < N; n++)  // Raise
        for (int f = 0; f <= O; f++)
            for (int e = 1; e <= MAXE; e++) {
                const Disk& d = s.node[n].disk;
                if (!(s.raises >> (4 * f + e) & 1) || !member(d, f) || !is_open(d) || d.e >= e) continue;
                if (n == SPARE && !raise_double) continue;
                State t = s;
                t.node[n].disk.e = e, t.node[n].disk.p = std::max<int>(d.p, e), t.node[n].disk.c = 0, t.node[n].ever = e + 1;
                emit(t, "Raise", e, n);
            }
}

static bool new_seat(const State& s, int l, int old, int n) { return in(l, n) && (init_ || !member_of(s, old, n)); }

// Who initialises opens the nodes in the order of their tickets, each when those before it vote in his list.
static bool in_turn(const State& s, int o, int n) {
    if (!init_ || init_unordered) return true;
    for (int m = 0; m < N; m++) {
        int before = s.node[m].op_tk[o], own = s.node[n].op_tk[o];
        if (in(s.op[o].l, m) && !s.node[m].op_ack[o] && (descending ? before > own : before < own)) return false;
    }
    return true;
}

template <class Emit> static void operators(const State& s, const std::vector<int>& known, Emit emit) {
    for (int o = 0; o < O; o++) {
        const Op& w = s.op[o];
        for (int old : known)
            for (int l = 0; l < n_lists; l++) {
                if (once && (old != 0 || l == 0)) continue;
                if (w.ph > BEGIN || (w.ph == BEGIN && (w.l != l || w.old != old))) continue;
                bool shrinks = w.ph == IDLE && !init_ && l != list_of(s, old);
                for (int n = 0; n < N; n++) {
                    shrinks = shrinks && !new_seat(s, l, old, n);
                    if (!in(l, n) || s.node[n].disk.adm || s.node[n].op_tk[o] || (once && !new_seat(s, l, old, n))) continue;
                    State t = s;
                    ticket(t, n, 21 + o);
                    t.node[n].op_tk[o] = t.node[n].disk.tk, t.node[n].op_same[o] = 1;
                    t.op[o].l = l, t.op[o].old = old, t.op[o].ph = !init_ ? CLOSE : init_one_look ? OPEN : CHECK;
                    for (int m = 0; m < N; m++)
                        if (new_seat(s, l, old, m) && !t.node[m].op_tk[o]) t.op[o].ph = BEGIN;
                    if (t.op[o].ph != BEGIN) t.op[o].f = fingerprint(t, o);
                    emit(t, "OpBegin", o + 1, n);
                }
                if (!shrinks) continue;
                State t = s;
                t.op[o].l = l, t.op[o].old = old, t.op[o].ph = CLOSE, t.op[o].f = fingerprint(t, o);
                emit(t, "OpShrink", o + 1, l);
            }
        int f = w.f;
        int closed = 0, checked = 0, acks = 0, oks = 0;
        for (int n = 0; n < N; n++) {
            const Column& col = s.node[n];
            closed += col.op_q1[o], checked += col.op_q2[o], acks += col.op_ack[o] > 0, oks += col.op_ok[o];
        }
        bool promised = w.ph == PROMISED_OPEN || (one_look && acks >= majority(w.l));
        if (w.ph == CHECK && !init_) {
            State t = s;
            t.op[o].ph = CLOSE, t.op[o].mx = 0;
            for (int n = 0; n < N; n++) t.node[n].op_q1[o] = t.node[n].op_q2[o] = 0;
            emit(t, "OpAgain", o + 1, 0);
        }
        for (int n = 0; n < N; n++) {
            const Column& col = s.node[n];
            const Disk& d = col.disk;
            if (col.op_tk[o] && col.op_same[o] && !d.adm && !has_ticket(d)) {
                State t = s;
                ticket(t, n, 21 + o);
                emit(t, "OpBeginAgain", o + 1, n);
            }
            if (w.ph >= CLOSE && !init_ && member(d, w.old) && (d.nxt == NONE || d.nxt == f || no_next)) {
                State t = s;
                Op& u = t.op[o];
                t.node[n].disk.nxt = f;
                if (w.ph == CLOSE) {
                    t.node[n].op_q1[o] = 1;
                    bool enough = closed + !col.op_q1[o] >= quorum(s, w.old);
                    if (one_pass) {
                        u.mx = std::max<int>(u.mx, std::max(d.e, d.p));
                        u.ph = enough ? OPEN : CLOSE, u.e = enough ? u.mx + 1 : 0;
                    } else {
                        u.ph = enough ? CHECK : CLOSE;
                    }
                }
                if (u.e <= MAXE) emit(t, "OpClose", o + 1, n);
            }
            bool still = !d.adm && holds(d, col.op_tk[o]);
            if (w.ph == CHECK && init_ && in(w.l, n) && !col.op_q2[o] && (still || voting(d, f))) {
                State t = s;
                t.node[n].op_q2[o] = 1;
                t.op[o].ph = checked + 1 == size(w.l) ? OPEN : CHECK;
                emit(t, "OpLook", o + 1, n);
            }
            if (w.ph == CHECK && col.op_q1[o] && !col.op_q2[o] && member(d, w.old) && d.nxt == f) {
                State t = s;
                Op& u = t.op[o];
                t.node[n].op_q2[o] = 1;
                u.mx = std::max<int>(u.mx, std::max(d.e, d.p));
                bool enough = checked + 1 == closed;
                u.ph = enough ? OPEN : CHECK, u.e = enough ? u.mx + 1 : 0;
                if (u.e <= MAXE) emit(t, "OpCheck", o + 1, n);
            }
            if (w.ph < OPEN || !in(w.l, n)) continue;
            bool waiting = awaits(s, o, f, n);
            if ((waiting && !init_) || voting(d, f)) {
                State t = s;
                t.node[n].disk.p = std::max(d.p, w.e);
                if (!oks && w.ph == OPEN) t.node[n].op_ack[o] = one_look ? 1 : 1 + d.e;
                emit(t, "OpPromise", o + 1, n);
                bool still = col.op_ack[o] == 1 + d.e && d.p >= w.e;
                if (acks >= majority(w.l) && still && !col.op_ok[o] && !init_ && !one_look) {
                    t = s;
                    t.node[n].op_ok[o] = 1;
                    if (oks + 1 >= majority(w.l)) {
                        t.op[o].ph = PROMISED_OPEN;
                        for (int m = 0; m < N; m++) t.node[m].op_ack[o] = t.node[m].op_ok[o] = 0;
                    }
                    emit(t, "OpStill", o + 1, n);
                }
            }
            if (waiting && in_turn(s, o, n) && (promised || open_unpromised || init_)) {
                State t = s;
                Disk u = blank();
                u.adm = u.live = 1, u.e = w.e, u.p = std::max(w.e, d.p), u.cfg = f;
                u.lka = d.lka, u.lke = d.lke, u.lkg = d.lkg, u.lkm = d.lkm;
                t.node[n].disk = u;
                voter(t.node[n]);
                if (w.e) t.raises |= 1u << (4 * f + w.e);
                emit(t, "OpOpen", o + 1, n);
            }
        }
    }
}

template <class Emit> static void faults(const State& s, Emit emit) {
    for (int n = 0; n < N; n++) {
        const Column& col = s.node[n];
        if (n == SPARE) continue;
        bool can_double = double_ && voting(col.disk, 0) && !s.node[SPARE].disk.adm;
        for (int data = 0; can_double && data < 2; data++) {  // TakeOver
            if (data ? !s.restart : !s.lose) continue;
            State t = s;
            Column& u = t.node[n];
            t.node[SPARE].disk = col.disk, u.doubled = 1;
            new_incarnation(t, n);
            if (data) t.restart--;
            else t.lose--, u.disk = blank(), u.out = 1;
            if (bearable(t)) emit(t, data ? "TakeOver(with data)" : "TakeOver", n, n);
        }
        if (s.roll) {
            State t = s;
            t.node[n].snap = col.disk;
            t.node[n].snap.live = t.node[n].snap.tlive = 0;
            emit(t, "Remember", n, n);
            t = s;
            t.roll--, t.node[n].disk = col.snap, t.node[n].out = 1;
            new_incarnation(t, n);
            if (bearable(t)) emit(t, "RollBack", n, n);
            if (reload) {  // in the same incarnation: connections live on
                t = s;
                t.roll--, t.node[n].disk = col.snap, t.node[n].out = 1;
                // Nothing of it is of this memory; a mutant asks for the process only, which never was another there.
                if (any_memory) t.node[n].disk.live = t.node[n].disk.adm;
                if (bearable(t)) emit(t, "RollBack(same process)", n, n);
            }
        }
        if (s.lose) {
            State t = s;
            t.lose--, t.node[n].disk = blank(), t.node[n].out = 1;
            if (bearable(t)) {
                emit(t, "Lose", n, n);
                if (col.disk.tk && ticket_apart) {
                    t.node[n].disk.tk = col.disk.tk, t.node[n].disk.tlive = col.disk.tlive;
                    emit(t, "Lose(hash)", n, n);
                }
            }
        }
        if (s.restart) {
            State t = s;
            t.restart--;
            new_incarnation(t, n);
            emit(t, "Restart", n, n);
        }
    }
}

template <class Emit> void Explorer::successors(const State& s, Emit emit) {
    u32 seen = 1;
    for (int n = 0; n < N; n++)
        if (s.node[n].disk.cfg != NONE) seen |= 1u << s.node[n].disk.cfg;
    std::vector<int> known;
    for (int f = 0; f <= O; f++)
        if (seen >> f & 1 && (f == 0 ? !init_ : true)) known.push_back(f);
    acquisitions(s, known, emit);
    storage(s, emit);
    recovery(s, known, emit);
    operators(s, init_ ? std::vector<int>{0} : known, emit);
    faults(s, emit);
}

static const char* violated(const State& s) {
    for (int a = 0; a < A; a++) {
        const Acq& q = s.acq[a];
        if (!q.done) continue;
        for (int b = 0; b < a; b++)
            if (s.acq[b].done && s.acq[b].te == q.te && s.acq[b].tg == q.tg) return "P1";
        if (!below(q.fe, q.fg, q.te, q.tg)) return "P2";
    }
    if (s.stale) return "NoStaleWrite";
    if (s.lost) return "NoLostUpdate";
    if (only_outcome) return nullptr;
    for (int n = 0; n < N; n++)
        if (s.node[n].again) return "NeverAgain";
    int voters[MAX_OPS + 1] = {}, ruling = 0;
    for (int n = 0; n < N; n++) {
        const Disk& d = s.node[n].disk;
        if (n != SPARE && d.cfg != NONE && voting(d, d.cfg)) voters[d.cfg]++;
    }
    for (int f = 0; f <= O; f++) {
        if (!voters[f]) continue;
        ruling += voters[f] >= quorum(s, f);
        if (f == 0 || no_past || init_) continue;
        int old = s.op[f - 1].old;
        if (voters[old] >= quorum(s, old)) return "OneList";
        for (int g = 1; g < f; g++)
            if (voters[g] && s.op[g - 1].old == old) return "OneList";
    }
    if (ruling > 1) return "OneList";
    if (unpromised) return nullptr;
    for (int n = 0; n < N; n++) {
        const Disk& d = s.node[n].disk;
        if (!admitted(d) || !d.e) continue;
        int l = list_of(s, d.cfg), holding = 0;
        for (int m = 0; m < N; m++)
            holding += in(l, m) && (s.node[m].out || s.node[m].disk.p >= d.e);
        if (holding < majority(l)) return "Promised";
    }
    return nullptr;
}

static int class_of(int n) {
    int c = 0;
    for (int l = 0; l < n_lists; l++) c |= in(l, n) << l;
    return c;
}

static void sort_columns(State& s) {
    for (int i = 1; i < N; i++)  // servers of one class stand side by side
        for (int j = i; j > 0 && class_of(j) == class_of(j - 1) && memcmp(&s.node[j], &s.node[j - 1], sizeof(Column)) < 0; j--)
            std::swap(s.node[j], s.node[j - 1]);
}

static void canonical(State& s) {
    if (!ticket_unbound && !client_ticket) {
        u64 alive = 0;
        for (int n = 0; n < N; n++) {
            Column& col = s.node[n];
            col.snap.tk = 0;
            if (!col.disk.tlive) col.disk.tk = 0;
            alive |= 1ull << col.disk.tk;
        }
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) {
                u8& t = s.node[n].rec_tk[k];
                if (t && !(alive >> t & 1)) t = DEAD;
            }
    }
    int begun = 0, order[MAX_RECS];
    for (int k = 0; k < K; k++) begun += s.rec[k].ph != IDLE, order[k] = k;
    State first = s;
    sort_columns(s);
    while (!client_ticket && std::next_permutation(order, order + begun)) {
        State other = first;
        for (int k = 0; k < begun; k++) {
            int j = order[k];
            other.rec[k] = first.rec[j];
            for (int n = 0; n < N; n++) {
                Column& c = other.node[n];
                const Column& d = first.node[n];
                c.rec_tk[k] = d.rec_tk[j], c.rec_same[k] = d.rec_same[j], c.rec_rd[k] = d.rec_rd[j];
                c.rec_ack[k] = d.rec_ack[j], c.rec_ok[k] = d.rec_ok[j], c.rec_up[k] = d.rec_up[j];
            }
        }
        sort_columns(other);
        if (memcmp(&other, &s, sizeof s) < 0) s = other;
    }
}

static u64 hash_of(const State& s) {
    u64 h = 0x9e3779b97f4a7c15ull;
    static_assert(sizeof(State) % 4 == 0);
    const char* bytes = reinterpret_cast<const char*>(&s);
    for (size_t i = 0; i < sizeof s; i += 4) {
        u32 x;
        memcpy(&x, bytes + i, 4);
        h = (h ^ x) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    h ^= h >> 29, h *= 0xc4ceb9fe1a85ec53ull, h ^= h >> 32;
    return h ? h : 1;
}

class Seen {
    u64* slots;
    u64 mask;

public:
    u64 count = 0;
    explicit Seen(int bits) : slots(static_cast<u64*>(calloc(1ull << bits, 8))), mask((1ull << bits) - 1) {}
    bool full() const { return count > mask / 10 * 9; }
    bool insert(u64 h) {
        u64 i = h & mask;
        for (; slots[i]; i = (i + 1) & mask)
            if (slots[i] == h) return false;
        slots[i] = h, count++;
        return true;
    }
};

static std::string show(const State& s) {
    std::string r;
    char b[200];
    for (int n = 0; n < N; n++) {
        const Disk& d = s.node[n].disk;
        if (!d.adm) r += d.tk ? (snprintf(b, sizeof b, " [blank, ticket %d]", d.tk), b) : " [blank]";
        else {
            snprintf(b, sizeof b, " [%se%d p%d c%d%s%s%s lock %d:(%d,%d)%s%s]", d.live ? "" : "RESTARTED ", d.e, d.p, d.c,
                     d.cfg ? (d.cfg == 1 ? " list1" : " list2") : "", d.nxt == NONE ? "" : " closed", d.tk ? " ticket" : "", d.lka,
                     d.lke, d.lkg, d.lkm ? "*" : "", s.node[n].out ? " OUT" : "");
            r += b;
        }
    }
    for (int a = 0; a < A; a++)
        if (s.acq[a].done) snprintf(b, sizeof b, "  a%d=(%d,%d)", a + 1, s.acq[a].te, s.acq[a].tg), r += b;
    return r;
}

static State initial(const std::map<std::string, std::string>& args) {
    State s;
    memset(&s, 0, sizeof s);
    auto number = [&](const char* k) { return args.count(k) ? atoi(args.at(k).c_str()) : 0; };
    for (int n = 0; n < N; n++) {
        Disk d = blank();
        if (in(0, n) && !init_) d.adm = d.live = 1, d.cfg = 0;
        if (stray && n == 1) d.p = 1;
        s.node[n].disk = d;
        s.node[n].ever = d.adm;
        d.live = 0;
        s.node[n].snap = d;
    }
    for (int a = 0; a < A; a++) s.acq[a].cfg = NONE;
    for (int k = 0; k < K; k++) s.rec[k].cfg = NONE;
    s.lose = number("lose"), s.roll = number("roll"), s.restart = number("restart");
    return s;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Trace { u32 parent; const char* action; u8 who, node; };

// Random walks: no memory, hence larger configurations. The seed decides all of them.
static int walk(const State& first, u64 least, int depth, u64 seed) {
    struct Step { State state; const char* action; int who, n; };
    double began = now();
    u64 walks = 0, steps = 0;
    std::vector<u64> completed(A + 1);
    std::mt19937_64 random(seed);
    std::vector<Step> next, path;
    std::vector<const char*> kinds;
    for (; steps < least; walks++) {
        State s = first;
        path.clear();
        for (int i = 0; i < depth; i++, steps++) {
            next.clear(), kinds.clear();
            Explorer::successors(s, [&](State& t, const char* action, int who, int n) {
                if (memcmp(&t, &s, sizeof s) == 0) return;
                next.push_back({t, action, who, n});
                for (auto kind : kinds) if (!strcmp(kind, action)) return;
                kinds.push_back(action);
            });
            if (next.empty()) break;
            // A kind of action is drawn first, else grants drown the rest.
            const char* kind = kinds[random() % kinds.size()];
            auto other = [&](const Step& step) { return strcmp(step.action, kind) != 0; };
            next.erase(std::remove_if(next.begin(), next.end(), other), next.end());
            path.push_back(next[random() % next.size()]);
            s = path.back().state;
            if (const char* bad = violated(s)) {
                for (auto& p : path) printf("%s(%d, n%d)%s\n", p.action, p.who, p.n, show(p.state).c_str());
                printf("VIOLATED %s walk=%llu steps=%zu seconds=%.1f\n", bad, (unsigned long long)walks, path.size(), now() - began);
                return 1;
            }
        }
        int done = 0;
        for (int a = 0; a < A; a++) done += s.acq[a].done;
        completed[done]++;
    }
    printf("OK walks=%llu steps=%llu seconds=%.1f", (unsigned long long)walks, (unsigned long long)steps, now() - began);
    for (int a = 0; a <= A; a++) printf(" completed_%d=%llu", a, (unsigned long long)completed[a]);
    puts("");
    return 0;
}

// Level by level: where time or memory ends before the states do, all schedules up to some length have been tried.
static int levels(State first, int bits, double seconds, double gigabytes) {
    double began = now();
    Seen seen(bits);
    canonical(first);
    seen.insert(hash_of(first));
    std::vector<State> level{first}, next;
    const char* bad = nullptr;
    int depth = 0;
    bool all = true;
    for (; !level.empty() && all && !bad; depth += all && !bad) {
        next.clear();
        while (!level.empty() && !bad) {
            State s = level.back();
            level.pop_back();
            Explorer::successors(s, [&](State& t, const char*, int, int) {
                canonical(t);
                if (bad || !seen.insert(hash_of(t))) return;
                next.push_back(t);
                bad = violated(t);
            });
            if (now() - began > seconds || seen.full() || double(next.size() + level.size()) * sizeof(State) > gigabytes * 1e9) {
                all = false;
                break;
            }
        }
        level.swap(next);
    }
    printf("%s%s states=%llu steps=%d seconds=%.1f collision=%.1e\n", bad ? "VIOLATED " : all ? "OK" : "UNFINISHED", bad ? bad : "",
           (unsigned long long)seen.count, depth, now() - began, double(seen.count) * double(seen.count) / 3.7e19);
    return bad ? 1 : all ? 0 : 3;
}

int main(int argc, char** argv) {
    std::map<std::string, std::string> args;
    for (int i = 1; i < argc; i++) {
        std::string a = argv[i];
        size_t at = a.find('=');
        args[a.substr(0, at)] = a.substr(at + 1);
    }
    auto number = [&](const char* k, int d) { return args.count(k) ? atoi(args[k].c_str()) : d; };
    auto split = [&](const std::string& text, char c) {
        std::vector<std::string> parts;
        std::string part;
        for (char x : text + c)
            if (x == c) {
                if (!part.empty()) parts.push_back(part);
                part.clear();
            } else part += x;
        return parts;
    };
    for (auto& list : split(args.count("lists") ? args["lists"] : "012", ',')) {
        for (char c : list) lists[n_lists] |= 1 << (c - '0'), N = std::max(N, c - '0' + 1);
        n_lists++;
    }
    A = number("acqs", 2), K = number("recs", 0), O = number("ops", 0), MAXG = number("maxg", 3), MAXE = number("maxe", 0);
    if (("," + args["feature"] + ",").find(",double,") != std::string::npos) SPARE = N++;
    if (N > MAX_NODES || A > MAX_ACQS || K > MAX_RECS || O > MAX_OPS || MAXG > 8 || MAXE > 3) return puts("too large"), 2;
    std::map<std::string, bool*> flags = {
        {"hint", &hint}, {"remint", &remint}, {"restore", &restore_}, {"guard", &guard},
        {"all_restarted", &all_restarted}, {"init", &init_}, {"only_outcome", &only_outcome}, {"unpromised", &unpromised}, {"stray", &stray}, {"once", &once}, {"descending", &descending},
        {"double", &double_}, {"finish", &finish}, {"rise", &rise}, {"reload", &reload}, {"unclaimed", &unclaimed}, {"doubt", &doubt}};
    std::map<std::string, bool*> rules = {
        {"mixed_epochs", &mixed_epochs}, {"no_ownership", &no_ownership}, {"no_own_limit", &no_own_limit},
        {"no_write_back", &no_write_back}, {"restore_early", &restore_early}, {"no_claim", &no_claim},
        {"no_guard", &no_guard}, {"no_loaded", &no_loaded}, {"no_row_lock", &no_row_lock}, {"client_ticket", &client_ticket}, {"ticket_unbound", &ticket_unbound},
        {"closed_read", &closed_read}, {"read_begin", &read_begin}, {"no_promise_field", &no_promise_field},
        {"no_epoch", &no_epoch}, {"raise_first", &raise_first}, {"admit_first", &admit_first}, {"admit_lowers_p", &admit_lowers_p}, {"no_ticket", &no_ticket},
        {"no_next", &no_next}, {"one_pass", &one_pass}, {"open_unpromised", &open_unpromised}, {"ticket_apart", &ticket_apart},
        {"fixed_ids", &fixed_ids}, {"no_past", &no_past}, {"any_incarnation", &any_incarnation}, {"any_memory", &any_memory}, {"init_unordered", &init_unordered}, {"init_one_look", &init_one_look},
        {"admit_unraised", &admit_unraised}, {"all_unraised", &all_unraised}, {"raise_double", &raise_double}, {"finish_unpromised", &finish_unpromised}, {"one_look", &one_look}};
    for (auto& f : split(args["feature"], ',')) {
        if (!flags.count(f)) return printf("unknown feature %s\n", f.c_str()), 2;
        *flags[f] = true;
    }
    for (auto& m : split(args["mutant"], ',')) {
        if (!rules.count(m)) return printf("unknown mutant %s\n", m.c_str()), 2;
        *rules[m] = true;
    }
    std::string mode = args.count("mode") ? args["mode"] : "deep";
    double seconds = args.count("seconds") ? atof(args["seconds"].c_str()) : 1e9, began = now();
    State first = initial(args);

    if (mode == "walk") return walk(first, strtoull(args["steps"].c_str(), nullptr, 10), number("depth", 80), number("seed", 1));
    if (mode == "levels") return levels(first, number("bits", 28), seconds, number("gigabytes", 6));

    bool broad = mode == "broad";  // breadth first: the shortest counterexample, at the price of memory
    Seen seen(number("bits", broad ? 25 : 28));
    canonical(first);
    seen.insert(hash_of(first));
    std::vector<State> states{first};
    std::vector<Trace> traces{{0, "", 0, 0}};
    u64 generated = 0;
    std::map<std::string, u64> fired;
    const char* bad = nullptr;
    u64 next = 0;
    bool complete = true;
    while (broad ? next < states.size() : !states.empty()) {
        u32 parent = u32(next);
        State s;
        if (broad) s = states[next++];
        else s = states.back(), states.pop_back();
        Explorer::successors(s, [&](State& t, const char* action, int who, int n) {
            if (bad) return;
            generated++;
            canonical(t);
            if (!seen.insert(hash_of(t))) return;
            fired[action]++;
            states.push_back(t);
            if (broad) traces.push_back({parent, action, u8(who), u8(n)});
            bad = violated(t);
        });
        if (bad) break;
        if ((seen.count & 0x3fff) < 40 && (now() - began > seconds || seen.full() || (broad && states.size() > 20000000))) {
            complete = false;
            break;
        }
    }
    double took = now() - began;
    if (bad) {
        std::vector<u32> path;
        if (broad)
            for (u32 i = u32(states.size()) - 1; i; i = traces[i].parent) path.push_back(i);
        for (size_t i = path.size(); i--;) printf("%2zu %s(%d)%s\n", path.size() - i, traces[path[i]].action, traces[path[i]].who, show(states[path[i]]).c_str());
        printf("VIOLATED %s states=%llu steps=%zu seconds=%.1f\n", bad, (unsigned long long)seen.count, path.size(), took);
        return 1;
    }
    printf("%s states=%llu generated=%llu seconds=%.1f collision=%.1e\n", complete ? "OK" : "UNFINISHED", (unsigned long long)seen.count,
           (unsigned long long)generated, took, double(seen.count) * double(seen.count) / 3.7e19);
    for (auto& [k, v] : fired) printf("  %s %llu\n", k.c_str(), (unsigned long long)v);
    return complete ? 0 : 3;
}
