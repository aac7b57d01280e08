------------------------------- MODULE Fencelock -------------------------------
(* The whole protocol in one model: how a quorum mints a token, what becomes of   *)
(* nodes that lose their memory, how the list of nodes changes, what the storage   *)
(* accepts. README.md explains it to people who have never read TLA+.              *)
(*                                                                                 *)
(* Messages. No message is ever taken away: a request that was sent once may be    *)
(* executed at any later time, any number of times, or never. That is loss, delay, *)
(* duplication and reordering. So no network is stored: an action "the node        *)
(* executes request R" is enabled from the moment that R may have been sent. A     *)
(* reply is what its action adds to the sender's knowledge; the sender may act on  *)
(* it at once, late, or never (the next action simply does not happen).            *)
(* What TCP gives, and all that is used of it: a request reaches only the          *)
(* incarnation (run_id) of the server to which its connection was opened. A reply  *)
(* may outlive its server.                                                         *)
(*                                                                                 *)
(* Clocks. There are none: a lock may end at any moment, so "it ends, and another  *)
(* gets it" is one step (Grant ignores the owner). An expired lock that nobody has *)
(* taken enables nothing that a living one forbids, so expiry needs no action of   *)
(* its own; neither does the deletion by RELEASE.                                  *)
EXTENDS Naturals, FiniteSets, Sequences, TLC

CONSTANTS
    Node,                          \* all servers
    Lists,                         \* Lists[0] the first list of nodes, Lists[1].. those that operators want
    Acqs, Recs, Ops,               \* how many acquisitions, recoverers, operators
    MaxG, MaxE,                    \* largest counter and epoch that are looked at
    Losses, Rollbacks, Restarts,   \* how often a server is blanked, comes back older, comes back unharmed
    Feature,                       \* which optional parts take part
    Mutant                         \* which rules are left out

VARIABLES
    run,     \* run[n]: the server's incarnation
    disk,    \* disk[n]: all that the server stores
    snap,    \* snap[n]: an older state of it, to which it may fall back
    out,     \* out[n], which nobody can see: .now it has lost memory and not been admitted since;
             \* .ever 1 + the highest epoch in which it could vote; .again it could do so twice; .twin another
             \* server has taken over its address, while it lives on, cut off, as the Spare
    acq,     \* the acquisitions: what each has heard
    rec,     \* the recoverers
    op,      \* the operators who change the list of nodes
    raises,  \* <<fingerprint, epoch>> for which RAISE has been sent
    db,      \* the storage: fence and row
    left     \* how many faults are still to come

vars == <<run, disk, snap, out, acq, rec, op, raises, db, left>>

Broken(rule) == rule \in Mutant
With(part) == part \in Feature
Max(a, b) == IF a > b THEN a ELSE b
Spare == Node \ UNION {Lists[l] : l \in DOMAIN Lists}  \* a server of no list, until it is the double of one
Majority(S) == Cardinality(S) \div 2 + 1
Below(s, t) == s[1] < t[1] \/ (s[1] = t[1] /\ s[2] < t[2])  \* of tokens <<epoch, counter>>
NoToken == <<0, 0>>
NoGhost == [tok |-> NoToken, v |-> 0]

\* A list's fingerprint covers its nodes' ids (of a new node the ticket under which it was opened; one that stays
\* keeps its id) and the list that it replaces: no list comes twice, even if one goes back to the same nodes.
NoTickets == [n \in Node |-> 0]
First == [l |-> 0, tk |-> NoTickets, past |-> <<>>]
None == [l |-> 99, tk |-> NoTickets, past |-> <<>>]
Members(f) == Lists[f.l]
Quorum(f) == Majority(Members(f))

NoLock == [a |-> 0, e |-> 0, g |-> 0, m |-> FALSE]
Blank == [adm |-> FALSE, e |-> 0, p |-> 0, r |-> 0, cfg |-> None, nxt |-> None, c |-> 0,
          lk |-> NoLock, tk |-> 0, tr |-> 0]
Fresh == [Blank EXCEPT !.adm = TRUE, !.r = 1, !.cfg = First]

Init ==
    /\ run = [n \in Node |-> 1]
    /\ \E s \in Lists[0] :  \* "stray": a recoverer died after one PROMISE, long ago
         disk = [n \in Node |-> IF n \notin Lists[0] \/ With("init") THEN Blank
                               ELSE [Fresh EXCEPT !.p = IF With("stray") /\ n = s THEN 1 ELSE 0]]
    /\ snap = disk
    /\ out = [n \in Node |-> [now |-> FALSE, ever |-> IF disk[n].adm THEN 1 ELSE 0, again |-> FALSE, twin |-> FALSE]]
    /\ acq = [a \in 1..Acqs |-> [begun |-> FALSE, done |-> FALSE, cfg |-> None, floor |-> NoToken,
                                 votes |-> {}, acks |-> {}, tok |-> NoToken, at |-> 0, v |-> 0]]
    /\ rec = [k \in 1..Recs |-> [ph |-> "idle", kind |-> "recover", all |-> FALSE, cfg |-> None, tk |-> NoTickets,
                                 tr |-> NoTickets, rd |-> {}, mx |-> 0, mc |-> 0, e |-> 0,
                                 ack |-> NoTickets, ok |-> {}, up |-> {}]]
    /\ op = [o \in 1..Ops |-> [ph |-> "idle", old |-> None, f |-> None, tk |-> NoTickets, tr |-> NoTickets, q1 |-> {}, q2 |-> {}, mx |-> 0,
                               e |-> 0, ack |-> NoTickets, ok |-> {}]]
    /\ raises = {}
    /\ db = [fence |-> NoToken, writes |-> 0, stale |-> FALSE, lost |-> FALSE,
             ghost |-> NoGhost]
    /\ left = [lose |-> Losses, roll |-> Rollbacks, restart |-> Restarts]

-------------------------------------------------------------------------------
(* What a node checks before it votes: marker, run_id, fingerprint, not closed.  *)

Admitted(n) == disk[n].adm /\ disk[n].r = run[n]
Member(n, f) == Admitted(n) /\ disk[n].cfg = f
Voting(n, f) == Member(n, f) /\ disk[n].nxt = None

-------------------------------------------------------------------------------
(* Acquisitions.                                                                 *)

Tokens == {acq[a].tok : a \in {b \in 1..Acqs : acq[b].done}} \cup {NoToken}
Highest == CHOOSE t \in Tokens : \A s \in Tokens : s = t \/ Below(s, t)
Fingerprints == {f \in {disk[n].cfg : n \in Node} \cup {First} : f /= None}

\* The node grants g, whoever had the lock. A vote that comes after the decision is of no use to anybody.
Granting(a, n, g, known) ==
    /\ g <= MaxG
    /\ disk' = [disk EXCEPT ![n].c = g, ![n].lk = [a |-> a, e |-> disk[n].e, g |-> g, m |-> FALSE]]
    /\ acq' = [acq EXCEPT ![a] = [known EXCEPT
                   !.votes = IF known.done THEN @ ELSE @ \cup {<<n, disk[n].e, g>>}]]
    /\ UNCHANGED <<run, snap, out, rec, op, raises, db, left>>

\* A mutant forgets that the run_id must be the server's present one: as if RELEASE, which asks for none, granted to who waits.
Grantor(n, f) == Voting(n, f) \/ (Broken("any_incarnation") /\ disk[n].adm /\ disk[n].cfg = f /\ disk[n].nxt = None)
Grants(n) == IF With("hint") THEN (disk[n].c + 1)..MaxG ELSE {disk[n].c + 1}

\* An acquisition begins with its first grant: beginning earlier would only weaken P2.
Begin(a, n, f) ==
    /\ ~acq[a].begun /\ (a > 1 => acq[a-1].begun)
    /\ Grantor(n, f)
    /\ \E g \in Grants(n) :
           Granting(a, n, g, [acq[a] EXCEPT !.begun = TRUE, !.cfg = f, !.floor = Highest])

\* ACQUIRE, first or resent or delayed. (If the lock is still ours the answer is the stored one: no change.)
Grant(a, n) ==
    /\ acq[a].begun /\ Grantor(n, acq[a].cfg)
    /\ \E g \in Grants(n) : Granting(a, n, g, acq[a])

\* REMINT: the holder b's RELEASE and a's ACQUIRE in one step.
Remint(a, b, n) ==
    /\ With("remint") /\ acq[b].done /\ a /= b
    /\ Voting(n, acq[b].cfg)
    /\ IF acq[a].begun THEN acq[a].cfg = acq[b].cfg ELSE a > 1 => acq[a-1].begun
    /\ LET c == IF disk[n].e = acq[b].tok[1] THEN Max(disk[n].c, acq[b].tok[2]) ELSE disk[n].c
       IN Granting(a, n, c + 1, IF acq[a].begun THEN acq[a]
             ELSE [acq[a] EXCEPT !.begun = TRUE, !.cfg = acq[b].cfg, !.floor = Highest])

\* A server and its double have one seat, and one vote.
Seats(S) == UNION {IF n \in Spare THEN {m \in Node : out[m].twin} ELSE {n} : n \in S}

\* T may be decided: the largest of one grant from each of a majority, all of one epoch.
Decidable(a) ==
    {<<e, T>> \in {<<v[2], v[3]>> : v \in acq[a].votes} :
        Cardinality(Seats({n \in Node : \E v \in acq[a].votes :
            v[1] = n /\ v[3] <= T /\ (v[2] = e \/ Broken("mixed_epochs"))})) >= Quorum(acq[a].cfg)}

Confirm(a, n) ==
    /\ acq[a].begun /\ Voting(n, acq[a].cfg)
    /\ \E d \in Decidable(a) : LET lk == disk[n].lk IN
        /\ disk[n].e = d[1]
        /\ (lk.a = a /\ lk.e = d[1] /\ ~lk.m) \/ Broken("no_ownership")
        /\ lk.g <= d[2] \/ Broken("no_own_limit") \/ (Broken("no_ownership") /\ lk.a /= a)
        /\ disk' = [disk EXCEPT ![n].c = Max(@, d[2])]
        /\ acq' = IF acq[a].done THEN acq ELSE [acq EXCEPT ![a].acks = @ \cup {<<n, d[1], d[2]>>}]
    /\ UNCHANGED <<run, snap, out, rec, op, raises, db, left>>

\* <<e, T>> stands on a majority.
Standing(a) ==
    LET heard == acq[a].votes \cup acq[a].acks IN
    IF Broken("no_write_back") THEN Decidable(a)
    ELSE {<<e, T>> \in {<<v[2], v[3]>> : v \in heard} :
          Cardinality(Seats({n \in Node : \E v \in heard : v[1] = n /\ v[3] = T
              /\ (v[2] = e \/ Broken("mixed_epochs"))})) >= Quorum(acq[a].cfg)}

Complete(a) ==
    /\ acq[a].begun /\ ~acq[a].done
    /\ \E t \in Standing(a) :
        /\ acq' = [acq EXCEPT ![a].done = TRUE, ![a].tok = t, ![a].acks = {}]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, db, left>>

\* RELEASE asks for no run_id: it never votes. The script does this only where the lock is a's still: it does less.
Release(a, n) ==
    /\ acq[a].done /\ disk[n].adm /\ disk[n].cfg = acq[a].cfg /\ disk[n].e = acq[a].tok[1]
    /\ disk' = [disk EXCEPT ![n].c = Max(@, acq[a].tok[2])]
    /\ UNCHANGED <<run, snap, out, acq, rec, op, raises, db, left>>

\* EXTEND where the key is missing: with a mark, and only once the lease is completed. Also on a node that does not vote.
Restore(a, n) ==
    /\ With("restore") /\ acq[a].begun
    /\ \/ /\ acq[a].done
          /\ disk' = [disk EXCEPT ![n].lk = [a |-> a, e |-> acq[a].tok[1], g |-> acq[a].tok[2], m |-> TRUE]]
       \/ /\ Broken("restore_early") /\ Voting(n, acq[a].cfg)
          /\ \E v \in acq[a].votes : v[1] = n /\ disk' =
                 [disk EXCEPT ![n].lk = [a |-> a, e |-> v[2], g |-> v[3], m |-> FALSE]]
    /\ UNCHANGED <<run, snap, out, acq, rec, op, raises, db, left>>

-------------------------------------------------------------------------------
(* The storage: claim, read, write. A write that is under way may still land      *)
(* after its sender has given up (COMMIT in doubt), as any action may come late.  *)
(* What the row holds is how often it was written: who writes when it is not what *)
(* he has read overwrites something.                                              *)
(* acq[a].at: 0 nothing yet, 1 claimed, 2 claimed and read, 3 has an object that   *)
(* he did not claim. acq[a].v is the write id that was read or loaded; ids are     *)
(* numbers here. db.ghost is a COMMIT of which nobody has heard the answer: until  *)
(* it ends it holds the row's lock, and whoever wants to write waits.              *)

MayWrite == db.writes < 4 /\ (db.ghost = NoGhost \/ Broken("no_row_lock"))

Claim(a) ==
    /\ With("guard") /\ acq[a].done /\ acq[a].at \in {0, 3} /\ ~Broken("no_claim")
    /\ ~Below(acq[a].tok, db.fence) /\ db.ghost = NoGhost
    /\ db' = [db EXCEPT !.fence = acq[a].tok]
    /\ acq' = [acq EXCEPT ![a].at = 1, ![a].v = 0]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, left>>

Read(a) ==
    /\ With("guard") /\ acq[a].done /\ acq[a].at = (IF Broken("no_claim") THEN 0 ELSE 1)
    /\ acq' = [acq EXCEPT ![a].at = 2, ![a].v = db.writes]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, db, left>>

Write(a) ==
    /\ With("guard") /\ acq[a].at = 2 /\ MayWrite
    /\ ~Below(acq[a].tok, db.fence) \/ Broken("no_guard")
    /\ LET fence == IF Below(db.fence, acq[a].tok) THEN acq[a].tok ELSE db.fence IN
        db' = [db EXCEPT !.fence = fence, !.writes = @ + 1, !.stale = @ \/ Below(acq[a].tok, db.fence),
                         !.lost = @ \/ acq[a].v /= db.writes]
    /\ acq' = [acq EXCEPT ![a].at = IF Broken("no_claim") THEN 0 ELSE 1]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, left>>

\* Without a claim: an object may be loaded at any time, also before the lock, and is kept after it was written.
Load(a) ==
    /\ With("unclaimed") /\ acq[a].at \in {0, 3}
    /\ acq' = [acq EXCEPT ![a].at = 3, ![a].v = db.writes]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, db, left>>

\* What the unit of work writes of it: the row must have the write id that was loaded.
MaySave(a) ==
    /\ With("unclaimed") /\ acq[a].done /\ acq[a].at = 3 /\ MayWrite
    /\ ~Below(acq[a].tok, db.fence)
    /\ acq[a].v = db.writes \/ Broken("no_loaded")

Save(a) ==
    /\ MaySave(a)
    /\ db' = [db EXCEPT !.fence = acq[a].tok, !.writes = @ + 1, !.lost = @ \/ acq[a].v /= db.writes]
    /\ acq' = [acq EXCEPT ![a].v = db.writes + 1]
    /\ UNCHANGED <<run, disk, snap, out, rec, op, raises, left>>

\* The same, and the answer to the COMMIT is lost. Nobody is made to load again, or to mint anew: wider than the guard.
SaveInDoubt(a) ==
    /\ With("doubt") /\ MaySave(a) /\ db.ghost = NoGhost
    /\ db' = [db EXCEPT !.ghost = [tok |-> acq[a].tok, v |-> acq[a].v]]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, op, raises, left>>

GhostCommits ==
    /\ db.ghost /= NoGhost
    /\ db' = [db EXCEPT !.fence = db.ghost.tok, !.writes = @ + 1, !.lost = @ \/ db.ghost.v /= db.writes,
                        !.ghost = NoGhost]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, op, raises, left>>

GhostEnds ==
    /\ db.ghost /= NoGhost
    /\ db' = [db EXCEPT !.ghost = NoGhost]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, op, raises, left>>

-------------------------------------------------------------------------------
(* Tickets. The node makes each up anew (`id`); in the mutant the client does.    *)

InUse == {disk[n].tk : n \in Node} \cup {snap[n].tk : n \in Node}
    \cup UNION {{rec[k].tk[n] : n \in Node} : k \in 1..Recs}
    \cup UNION {{op[o].tk[n] : n \in Node} : o \in 1..Ops}
    \cup UNION {{disk[m].cfg.tk[n] : n \in Node} : m \in Node}
    \cup UNION {{snap[m].cfg.tk[n] : n \in Node} : m \in Node}
    \cup UNION {{disk[m].nxt.tk[n] : n \in Node} : m \in Node}
    \cup UNION {{snap[m].nxt.tk[n] : n \in Node} : m \in Node}
    \cup UNION {{acq[a].cfg.tk[n] : n \in Node} : a \in 1..Acqs}
NewId(mine) == IF Broken("client_ticket") THEN mine ELSE CHOOSE i \in 1..50 : i \notin InUse /\ \A j \in 1..(i-1) : j \in InUse

HasTicket(n) == disk[n].tk /= 0 /\ disk[n].tr = run[n]
\* What BEGIN makes of node n, by a sender whose own ticket would be `mine`.
Ticketed(n, mine) == IF HasTicket(n) THEN disk[n]
                     ELSE [disk[n] EXCEPT !.tk = NewId(mine), !.tr = run[n]]
Holds(n, t) == t /= 0 /\ disk[n].tk = t /\ (disk[n].tr = run[n] \/ Broken("ticket_unbound"))
Open(n) == disk[n].nxt = None \/ Broken("closed_read")

\* Of a recoverer or an operator: how many have promised to him; whether a majority has, and is known to hold the promise still.
Acks(who) == Cardinality({n \in Node : who.ack[n] > 0})
HasPromise(k) == rec[k].ph = "promised" \/ (Broken("one_look") /\ Acks(rec[k]) >= Quorum(rec[k].cfg))
OpHasPromise(o) == op[o].ph = "promised" \/ (Broken("one_look") /\ Acks(op[o]) >= Quorum(op[o].f))

-------------------------------------------------------------------------------
(* Recovery of a node that is blank or restarted.                                 *)

Begins(k, n) ==
    /\ disk' = [disk EXCEPT ![n] = Ticketed(n, k)]
    /\ UNCHANGED <<run, snap, out, acq, op, raises, db, left>>

RecBegin(k, n, f) ==
    /\ rec[k].ph = "idle" /\ n \in Members(f) /\ ~Admitted(n) /\ Open(n)
    /\ \E all \in (IF With("all_restarted") THEN BOOLEAN ELSE {FALSE}) :
       rec' = [rec EXCEPT ![k].ph = "begin", ![k].all = all, ![k].cfg = f,
                          ![k].tk[n] = Ticketed(n, k).tk, ![k].tr[n] = run[n]]
    /\ Begins(k, n)

\* Several nodes at once: all the tickets first, then the reading. So it must be where more than a minority restarted.
RecBeginMore(k, n) ==
    /\ (rec[k].ph = "begin") \/ (Broken("read_begin") /\ rec[k].ph \in {"read", "chosen"})
    /\ n \in Members(rec[k].cfg) /\ rec[k].tk[n] = 0 /\ ~Admitted(n) /\ Open(n) /\ n \notin rec[k].rd
    /\ rec' = [rec EXCEPT ![k].tk[n] = Ticketed(n, k).tk, ![k].tr[n] = run[n]]
    /\ Begins(k, n)

\* A BEGIN that arrives once more, on a connection of the same incarnation.
BeginAgain(k, n) ==
    /\ rec[k].tk[n] /= 0 /\ rec[k].tr[n] = run[n] /\ ~Admitted(n) /\ ~HasTicket(n)
    /\ UNCHANGED rec
    /\ Begins(k, n)

\* Whose word counts: who votes (somebody else may have admitted it meanwhile); and where all restarted, who keeps our ticket.
Readable(k, n) ==
    /\ Open(n)
    /\ rec[k].kind = "finish" => Voting(n, rec[k].cfg)
    /\ \/ Member(n, rec[k].cfg)
       \/ rec[k].all /\ disk[n].adm /\ disk[n].cfg = rec[k].cfg /\ ~Admitted(n) /\ Holds(n, rec[k].tk[n])

Seen(n) == IF Broken("no_promise_field") THEN disk[n].e ELSE Max(disk[n].e, disk[n].p)

RecRead(k, n) ==
    /\ rec[k].ph \in {"begin", "read"} /\ n \in Members(rec[k].cfg) \ rec[k].rd /\ Readable(k, n)
    /\ LET rd == rec[k].rd \cup {n}
           mx == Max(rec[k].mx, Seen(n))
           enough == Cardinality(rd) >= (IF rec[k].all THEN Cardinality(Members(rec[k].cfg)) ELSE Quorum(rec[k].cfg))
           e == IF Broken("no_epoch") THEN mx ELSE mx + 1
       IN /\ enough => e <= MaxE
          /\ rec' = [rec EXCEPT ![k].rd = IF enough /\ ~Broken("read_begin") THEN {} ELSE rd,
                                ![k].mx = IF enough /\ ~Broken("read_begin") THEN 0 ELSE mx, ![k].mc = IF Broken("no_epoch") THEN Max(@, disk[n].c) ELSE 0,
                                ![k].ph = IF enough THEN "chosen" ELSE "read", ![k].e = IF enough THEN e ELSE 0,
                                ![k].up = IF With("double") /\ ~Member(n, rec[k].cfg) THEN @ \cup {n} ELSE @]
    /\ UNCHANGED <<run, disk, snap, out, acq, op, raises, db, left>>

\* Who finishes a change that was interrupted: a node of this list that has not voted in it yet.
Waits(k, n) ==
    /\ rec[k].kind = "finish" /\ n \in Members(rec[k].cfg)
    /\ \/ ~disk[n].adm /\ Holds(n, rec[k].cfg.tk[n])
       \/ Admitted(n) /\ disk[n].nxt = rec[k].cfg

RecPromise(k, n) ==
    /\ rec[k].ph \in {"chosen", "promised"} /\ n \in Members(rec[k].cfg)
    /\ Readable(k, n) \/ Waits(k, n)
    /\ LET too == Broken("raise_first") /\ Admitted(n) /\ disk[n].e < rec[k].e IN
       /\ disk' = [disk EXCEPT ![n].p = Max(@, rec[k].e), ![n].e = IF too THEN rec[k].e ELSE @]
       /\ out' = IF too THEN [out EXCEPT ![n].ever = rec[k].e + 1] ELSE out
    /\ rec' = [rec EXCEPT ![k].ack[n] = IF rec[k].ok = {} /\ rec[k].ph = "chosen" THEN IF Broken("one_look") THEN 1 ELSE 1 + disk[n].e ELSE @]
    /\ raises' = IF Broken("one_look") /\ Acks(rec'[k]) >= Quorum(rec[k].cfg) THEN raises \cup {<<rec[k].cfg, rec[k].e>>} ELSE raises
    /\ UNCHANGED <<run, snap, acq, op, db, left>>

\* When a majority has promised, a second look: each holds the promise still, and is in the epoch in which it made it. Else it
\* may have forgotten the promise meanwhile, and been admitted by somebody to whom the others had not yet told theirs.
RecStill(k, n) ==
    /\ rec[k].ph = "chosen" /\ n \in Members(rec[k].cfg) \ rec[k].ok
    /\ Readable(k, n) \/ Waits(k, n)
    /\ Acks(rec[k]) >= Quorum(rec[k].cfg) /\ ~Broken("one_look")
    /\ rec[k].ack[n] = 1 + disk[n].e /\ disk[n].p >= rec[k].e
    /\ IF Cardinality(rec[k].ok) + 1 >= Quorum(rec[k].cfg)
       THEN /\ rec' = [rec EXCEPT ![k].ph = "promised", ![k].ack = NoTickets, ![k].ok = {}]
            /\ raises' = raises \cup {<<rec[k].cfg, rec[k].e>>}
       ELSE /\ rec' = [rec EXCEPT ![k].ok = @ \cup {n}]
            /\ UNCHANGED raises
    /\ UNCHANGED <<run, disk, snap, out, acq, op, db, left>>

\* RAISE, by the recoverer, or by whoever saw that epoch on another node. Not of a double: it is cut off. Counters begin anew.
Raise(n, f, e) ==
    /\ n \notin Spare \/ Broken("raise_double")
    /\ Member(n, f) /\ Open(n) /\ disk[n].e < e
    /\ disk' = [disk EXCEPT ![n].e = e, ![n].p = Max(@, e), ![n].c = 0]
    /\ out' = [out EXCEPT ![n].ever = e + 1]
    /\ UNCHANGED <<run, snap, acq, rec, op, raises, db, left>>

\* The recoverer's own RAISE, where he has to wait for it.
RecRaise(k, n) ==
    /\ rec[k].ph \in {"chosen", "promised"}
    /\ (With("double") /\ rec[k].kind = "recover") \/ rec[k].kind = "finish"
    /\ HasPromise(k) /\ n \in Members(rec[k].cfg) \ rec[k].up /\ Member(n, rec[k].cfg) /\ Open(n)
    /\ rec' = [rec EXCEPT ![k].up = @ \cup {n}]
    /\ IF disk[n].e < rec[k].e
       THEN /\ disk' = [disk EXCEPT ![n].e = rec[k].e, ![n].p = Max(@, rec[k].e), ![n].c = 0]
            /\ out' = [out EXCEPT ![n].ever = rec[k].e + 1]
       ELSE UNCHANGED <<disk, out>>
    /\ UNCHANGED <<run, snap, acq, op, raises, db, left>>

\* Where a server's double may live on, cut off, it must not find a majority in the old epoch: a majority is raised
\* before; where all restarted, whoever votes.
Raised(k) ==
    \/ ~With("double") /\ rec[k].kind /= "finish"
    \/ Broken("admit_unraised") \/ (rec[k].all /\ Broken("all_unraised"))
    \/ Cardinality(rec[k].up) >= (IF rec[k].all THEN Cardinality(Members(rec[k].cfg)) ELSE Quorum(rec[k].cfg))

\* A node may vote in epoch e, and has forgotten what it did before.
Voter(n, e) == [out[n] EXCEPT !.now = FALSE, !.ever = Max(@, e + 1), !.again = @ \/ e < out[n].ever]

\* ADMIT. It does not wait for RAISE, doubles apart: the promises suffice. `p` is never lowered.
Admit(k, n) ==
    /\ rec[k].ph \in {"chosen", "promised"} /\ rec[k].tk[n] /= 0 /\ ~Admitted(n)
    /\ Holds(n, rec[k].tk[n]) \/ Broken("no_ticket")
    /\ Open(n)
    /\ (HasPromise(k) /\ Raised(k)) \/ Broken("admit_first") \/ Broken("no_epoch")
    /\ disk' = [disk EXCEPT ![n] = [Blank EXCEPT !.adm = TRUE, !.e = rec[k].e, !.r = run[n], !.cfg = rec[k].cfg,
            !.p = IF Broken("admit_lowers_p") THEN rec[k].e ELSE Max(rec[k].e, disk[n].p),
            !.c = rec[k].mc, !.lk = disk[n].lk]]
    /\ out' = [out EXCEPT ![n] = Voter(n, rec[k].e)]
    /\ UNCHANGED <<run, snap, acq, rec, op, raises, db, left>>

\* An operator, of the present list, who opens those that an interrupted change has left; their epoch may be above all he sees.
Finish(k, f) ==
    /\ With("finish") /\ rec[k].ph = "idle" /\ f /= First
    /\ rec' = [rec EXCEPT ![k].ph = "read", ![k].kind = "finish", ![k].cfg = f]
    /\ UNCHANGED <<run, disk, snap, out, acq, op, raises, db, left>>

FinishLook(k, n) ==
    /\ rec[k].ph = "read" /\ Waits(k, n) /\ Seen(n) > rec[k].mx
    /\ rec' = [rec EXCEPT ![k].mx = Seen(n)]
    /\ UNCHANGED <<run, disk, snap, out, acq, op, raises, db, left>>

FinishOpen(k, n) ==
    /\ rec[k].ph \in {"chosen", "promised"} /\ Waits(k, n)
    /\ (HasPromise(k) /\ Raised(k)) \/ Broken("finish_unpromised")
    /\ disk' = [disk EXCEPT ![n] = [Blank EXCEPT !.adm = TRUE, !.e = rec[k].e, !.p = Max(rec[k].e, disk[n].p),
                                    !.r = run[n], !.cfg = rec[k].cfg, !.lk = disk[n].lk]]
    /\ out' = [out EXCEPT ![n] = Voter(n, rec[k].e)]
    /\ raises' = raises \cup {<<rec[k].cfg, rec[k].e>>}
    /\ UNCHANGED <<run, snap, acq, rec, op, db, left>>

\* A client whose token the storage has refused because of its epoch brings the nodes above the one that it names.
\* That can be any.
Rise(k, f, e) ==
    /\ With("rise") /\ rec[k].ph = "idle"
    /\ rec' = [rec EXCEPT ![k].ph = "chosen", ![k].kind = "rise", ![k].cfg = f, ![k].e = e]
    /\ UNCHANGED <<run, disk, snap, out, acq, op, raises, db, left>>

-------------------------------------------------------------------------------
(* Operators: initialise, or close one list and open another.                     *)

NewSeats(l, old) == Lists[l] \ (IF With("init") THEN {} ELSE Members(old))  \* those that are new
NextList(l, old, tk) ==
    [l |-> l,
     tk |-> [n \in Node |-> IF n \notin Lists[l] \/ Broken("fixed_ids") THEN 0
                            ELSE IF tk[n] /= 0 \/ With("init") THEN tk[n] ELSE old.tk[n]],
     past |-> IF With("init") \/ Broken("no_past") THEN <<>> ELSE Append(old.past, <<old.l, old.tk>>)]
OpTicket(o) == 20 + o
Olds == IF With("init") THEN {First} ELSE Fingerprints  \* which list an operator wants to replace

FirstPhase == IF ~With("init") THEN "close" ELSE IF Broken("init_one_look") THEN "open" ELSE "check"

\* A ticket for each new node; also for one of the old list that is blank, and gets a new seat in the next list.
OpBegin(o, n, l, old) ==
    /\ op[o].ph = "idle" \/ (op[o].ph = "begin" /\ op[o].f.l = l /\ op[o].old = old)
    /\ n \in Lists[l] /\ ~disk[n].adm /\ op[o].tk[n] = 0
    /\ With("once") => old = First /\ l /= 0 /\ n \in NewSeats(l, old)
    /\ LET tk == [op[o].tk EXCEPT ![n] = Ticketed(n, OpTicket(o)).tk]
       IN op' = [op EXCEPT ![o].old = old, ![o].f = NextList(l, old, tk), ![o].tk = tk, ![o].tr[n] = run[n],
                 ![o].ph = IF \A m \in NewSeats(l, old) : tk[m] /= 0 THEN FirstPhase ELSE "begin"]
    /\ disk' = [disk EXCEPT ![n] = Ticketed(n, OpTicket(o))]
    /\ UNCHANGED <<run, snap, out, acq, rec, raises, db, left>>

\* Where no node is new.
OpShrink(o, l, old) ==
    /\ op[o].ph = "idle" /\ ~With("init") /\ l /= old.l /\ NewSeats(l, old) = {}
    /\ With("once") => old = First
    /\ op' = [op EXCEPT ![o].ph = "close", ![o].old = old, ![o].f = NextList(l, old, NoTickets)]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, raises, db, left>>

OpBeginAgain(o, n) ==
    /\ op[o].tk[n] /= 0 /\ op[o].tr[n] = run[n] /\ ~disk[n].adm /\ ~HasTicket(n)
    /\ disk' = [disk EXCEPT ![n] = Ticketed(n, OpTicket(o))]
    /\ UNCHANGED <<run, snap, out, acq, rec, op, raises, db, left>>

OpClose(o, n) ==
    /\ op[o].ph \in {"close", "check", "open", "promised"} /\ ~With("init") /\ Member(n, op[o].old)
    /\ disk[n].nxt \in {None, op[o].f} \/ Broken("no_next")
    /\ disk' = [disk EXCEPT ![n].nxt = op[o].f]
    /\ IF op[o].ph = "close"
       THEN LET q1 == op[o].q1 \cup {n}
                enough == Cardinality(q1) >= Quorum(op[o].old)
                mx == Max(op[o].mx, Max(disk[n].e, disk[n].p))
            IN IF Broken("one_pass")
               THEN /\ enough => mx + 1 <= MaxE
                    /\ op' = [op EXCEPT ![o].q1 = q1, ![o].mx = mx, ![o].ph = IF enough THEN "open" ELSE "close",
                                        ![o].e = IF enough THEN mx + 1 ELSE 0]
               ELSE op' = [op EXCEPT ![o].q1 = q1, ![o].ph = IF enough THEN "check" ELSE "close"]
       ELSE UNCHANGED op
    /\ UNCHANGED <<run, snap, out, acq, rec, raises, db, left>>

\* The second pass.
OpCheck(o, n) ==
    /\ op[o].ph = "check" /\ n \in op[o].q1 \ op[o].q2
    /\ Member(n, op[o].old) /\ disk[n].nxt = op[o].f
    /\ LET q2 == op[o].q2 \cup {n}
           mx == Max(op[o].mx, Max(disk[n].e, disk[n].p))
           enough == q2 = op[o].q1
       IN /\ enough => mx + 1 <= MaxE
          /\ op' = [op EXCEPT ![o].q2 = q2, ![o].mx = mx, ![o].ph = IF enough THEN "open" ELSE "check",
                              ![o].e = IF enough THEN mx + 1 ELSE 0]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, raises, db, left>>

OpAgain(o) ==
    /\ op[o].ph = "check" /\ ~With("init")
    /\ op' = [op EXCEPT ![o].ph = "close", ![o].q1 = {}, ![o].q2 = {}, ![o].mx = 0]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, raises, db, left>>

\* Initialising: when every node has had a ticket, look whether every node has it still (or votes in this list already).
OpLook(o, n) ==
    /\ op[o].ph = "check" /\ With("init") /\ n \in Members(op[o].f) \ op[o].q2
    /\ (~disk[n].adm /\ Holds(n, op[o].tk[n])) \/ Voting(n, op[o].f)
    /\ op' = [op EXCEPT ![o].q2 = @ \cup {n}, ![o].ph = IF op[o].q2 \cup {n} = Members(op[o].f) THEN "open" ELSE "check"]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, raises, db, left>>

\* A new node that still has its ticket, or an old one that stays and is closed in favour of this very list.
Awaits(o, n) == \/ ~disk[n].adm /\ Holds(n, op[o].tk[n])
                \/ ~With("init") /\ Member(n, op[o].old) /\ disk[n].nxt = op[o].f

\* PROMISE to the new list, before any of its nodes may vote. (When initialising: note that a node votes.)
OpPromise(o, n) ==
    /\ op[o].ph \in {"open", "promised"} /\ n \in Members(op[o].f)
    /\ (Awaits(o, n) /\ ~With("init")) \/ Voting(n, op[o].f)
    /\ disk' = [disk EXCEPT ![n].p = Max(@, op[o].e)]
    /\ op' = [op EXCEPT ![o].ack[n] = IF op[o].ok = {} /\ op[o].ph = "open" THEN IF Broken("one_look") THEN 1 ELSE 1 + disk[n].e ELSE @]
    /\ UNCHANGED <<run, snap, out, acq, rec, raises, db, left>>

OpStill(o, n) ==
    /\ op[o].ph = "open" /\ n \in Members(op[o].f) \ op[o].ok /\ ~With("init") /\ ~Broken("one_look")
    /\ Awaits(o, n) \/ Voting(n, op[o].f)
    /\ Acks(op[o]) >= Quorum(op[o].f)
    /\ op[o].ack[n] = 1 + disk[n].e /\ disk[n].p >= op[o].e
    /\ op' = IF Cardinality(op[o].ok) + 1 >= Quorum(op[o].f)
             THEN [op EXCEPT ![o].ph = "promised", ![o].ack = NoTickets, ![o].ok = {}]
             ELSE [op EXCEPT ![o].ok = @ \cup {n}]
    /\ UNCHANGED <<run, disk, snap, out, acq, rec, raises, db, left>>

\* Who initialises opens the nodes in the order of their tickets, each when those before it vote in his list. (Tickets are
\* random, here the youngest is the largest; "descending" turns the order round.)
InTurn(o, n) == \A m \in {m \in Members(op[o].f) : op[o].ack[m] = 0} :
    IF With("descending") THEN op[o].tk[m] <= op[o].tk[n] ELSE op[o].tk[m] >= op[o].tk[n]

OpOpen(o, n) ==
    /\ op[o].ph \in {"open", "promised"} /\ n \in Members(op[o].f) /\ Awaits(o, n)
    /\ With("init") => InTurn(o, n) \/ Broken("init_unordered")
    /\ OpHasPromise(o) \/ Broken("open_unpromised") \/ With("init")
    /\ disk' = [disk EXCEPT ![n] = [Blank EXCEPT !.adm = TRUE, !.e = op[o].e, !.p = Max(op[o].e, disk[n].p),
                                    !.r = run[n], !.cfg = op[o].f, !.lk = disk[n].lk]]
    /\ out' = [out EXCEPT ![n] = Voter(n, op[o].e)]
    /\ raises' = IF op[o].e > 0 THEN raises \cup {<<op[o].f, op[o].e>>} ELSE raises
    /\ UNCHANGED <<run, snap, acq, rec, op, db, left>>

-------------------------------------------------------------------------------
(* Faults. THE ASSUMPTION: of no list is a majority out at one time. A server     *)
(* that comes back with all its data (Restart) has lost nothing and is not out.   *)

Bearable == \A l \in DOMAIN Lists : Cardinality({n \in Lists[l] : out'[n].now}) < Majority(Lists[l])

Remember(n) ==
    /\ left.roll > 0 /\ snap[n] /= disk[n]
    /\ snap' = [snap EXCEPT ![n] = disk[n]]
    /\ UNCHANGED <<run, disk, out, acq, rec, op, raises, db, left>>

RollBack(n) ==
    /\ left.roll > 0 /\ left' = [left EXCEPT !.roll = @ - 1]
    /\ \/ run' = [run EXCEPT ![n] = @ + 1] /\ disk' = [disk EXCEPT ![n] = snap[n]]
       \* It follows a server that is behind, and is promoted again: neither its process nor a connection ends. Of
       \* what it has loaded, nothing is of this memory (0); a mutant asks for the process only.
       \/ /\ With("reload") /\ UNCHANGED run
          /\ disk' = [disk EXCEPT ![n] = IF Broken("any_memory") THEN snap[n] ELSE [snap[n] EXCEPT !.r = 0, !.tr = 0]]
    /\ out' = [out EXCEPT ![n].now = TRUE] /\ Bearable
    /\ UNCHANGED <<snap, acq, rec, op, raises, db>>

\* FLUSHALL or eviction: same incarnation. A blank restart differs only in cutting connections, which forbids.
Lose(n) ==
    /\ left.lose > 0 /\ left' = [left EXCEPT !.lose = @ - 1]
    /\ \/ disk' = [disk EXCEPT ![n] = Blank]
       \/ Broken("ticket_apart") /\ disk[n].tk /= 0 /\ disk' = [disk EXCEPT ![n] = [Blank EXCEPT !.tk = disk[n].tk, !.tr = disk[n].tr]]
    /\ out' = [out EXCEPT ![n].now = TRUE] /\ Bearable
    /\ UNCHANGED <<run, snap, acq, rec, op, raises, db>>

Restart(n) ==
    /\ left.restart > 0 /\ left' = [left EXCEPT !.restart = @ - 1]
    /\ run' = [run EXCEPT ![n] = @ + 1]
    /\ UNCHANGED <<disk, snap, out, acq, rec, op, raises, db>>

\* Another server takes over the address, blank or with all the data, while this one lives on: the clients that
\* have a connection to it still reach it; nobody else does.
TakeOver(n) ==
    /\ With("double") /\ Voting(n, First)
    /\ \E s \in Spare, data \in BOOLEAN :
        /\ ~disk[s].adm
        /\ IF data THEN left.restart > 0 ELSE left.lose > 0
        /\ left' = IF data THEN [left EXCEPT !.restart = @ - 1] ELSE [left EXCEPT !.lose = @ - 1]
        /\ disk' = [disk EXCEPT ![s] = [disk[n] EXCEPT !.r = run[s]], ![n] = IF data THEN @ ELSE Blank]
        /\ run' = [run EXCEPT ![n] = @ + 1]
        /\ out' = [out EXCEPT ![n].twin = TRUE, ![n].now = @ \/ ~data] /\ Bearable
    /\ UNCHANGED <<snap, acq, rec, op, raises, db>>

-------------------------------------------------------------------------------
Next ==
    \/ \E a \in 1..Acqs :
        \/ Complete(a) \/ Claim(a) \/ Read(a) \/ Write(a) \/ Load(a) \/ Save(a) \/ SaveInDoubt(a)
        \/ \E n \in Node : \/ Grant(a, n) \/ Confirm(a, n) \/ Release(a, n) \/ Restore(a, n)
                           \/ \E f \in Fingerprints : Begin(a, n, f)
                           \/ \E b \in 1..Acqs : Remint(a, b, n)
    \/ GhostCommits \/ GhostEnds
    \/ \E k \in 1..Recs, n \in Node :
        \/ RecBeginMore(k, n) \/ BeginAgain(k, n) \/ RecRead(k, n) \/ RecPromise(k, n) \/ RecStill(k, n)
        \/ RecRaise(k, n) \/ Admit(k, n) \/ FinishLook(k, n) \/ FinishOpen(k, n)
        \/ \E f \in Fingerprints : (k > 1 => rec[k-1].ph /= "idle") /\ (RecBegin(k, n, f) \/ Finish(k, f) \/ \E e \in 1..MaxE : Rise(k, f, e))
    \/ \E n \in Node, r \in raises : Raise(n, r[1], r[2])
    \/ \E o \in 1..Ops : \/ OpAgain(o) \/ \E l \in DOMAIN Lists, f \in Olds : OpShrink(o, l, f)
        \/ \E n \in Node : \/ OpBeginAgain(o, n) \/ OpClose(o, n) \/ OpCheck(o, n) \/ OpLook(o, n) \/ OpPromise(o, n) \/ OpStill(o, n)
                           \/ OpOpen(o, n)
                           \/ \E l \in DOMAIN Lists, f \in Olds : OpBegin(o, n, l, f)
    \/ \E n \in Node \ Spare : Remember(n) \/ RollBack(n) \/ Lose(n) \/ Restart(n) \/ TakeOver(n)

Spec == Init /\ [][Next]_vars

-------------------------------------------------------------------------------
P1 == \A a, b \in 1..Acqs : a /= b /\ acq[a].done /\ acq[b].done => acq[a].tok /= acq[b].tok
P2 == \A a \in 1..Acqs : acq[a].done => Below(acq[a].floor, acq[a].tok)
NoStaleWrite == ~db.stale
\* Of those who claim, and of objects, claimed or not.
NoLostUpdate == ~db.lost
\* Why recovery is right: whoever has forgotten what he did in an epoch never votes in it again. Within an epoch
\* then nobody forgets, and the lock core is right; and the epoch is the upper half of the token.
NeverAgain == \A n \in Node : ~out[n].again
\* Why a change of nodes is right: there are never two lists that have a majority; once a list votes, the one before has
\* none, and no other votes in its place. (Of two lists that were made at once by init, a minority of one may vote.)
Voters(f) == {n \in Node : Voting(n, f)}
OneList ==
    /\ \A n, m \in Node : LET f == disk[n].cfg
                             g == disk[m].cfg
       IN f /= g /\ Voting(n, f) /\ Voting(m, g) =>
              Cardinality(Voters(f)) < Quorum(f) \/ Cardinality(Voters(g)) < Quorum(g)
    /\ Broken("no_past") \/ With("init") \/ \A o \in 1..Ops : Voters(op[o].f) /= {} =>
           /\ Cardinality(Voters(op[o].old)) < Quorum(op[o].old)
           /\ \A q \in 1..Ops : op[q].f /= op[o].f /\ op[q].old = op[o].old => Voters(op[q].f) = {}
\* Why epochs are not reused: nobody votes in one that a majority has not promised, lost memories apart.
Promised == \A n \in Node : Admitted(n) /\ disk[n].e > 0 =>
    LET L == Members(disk[n].cfg) IN
    Cardinality({m \in L : out[m].now \/ disk[m].p >= disk[n].e}) >= Majority(L)
================================================================================
