---------------------------- MODULE MoveRange ----------------------------
(* One key range moves from the old owner S to the new owner T while publishers, workers and several movers are active.

   A mover is named by its epoch. A mover may stop for ever after any step (kill -9), or go on much later, also after
   a later mover has begun: a statement whose reply was lost is a step of a mover that somebody believes to be dead.
   README.md beside this file maps each action to a function. The constants Check... switch a guard of the protocol
   off; each of those variants must fail. *)
EXTENDS Naturals, FiniteSets

CONSTANTS Old,          \* ids of messages that wait at S in the beginning
          New,          \* ids that publishers publish during the move
          Publishers,   \* each publishes one id of New, so two of them may publish the same one
          MaxEpoch,     \* number of movers, one after the other or at once
          Aborters,     \* movers that may undo the change instead
          MaxClaims,    \* claims of each message
          CheckEpoch,   \* removing from S checks the mover's epoch there
          CheckRows,    \* removing from S checks that the message waits, unchanged since it was copied
          LockRange,    \* a publish holds the map row of its shard until it commits, and the switch waits for that
          HideCopies,   \* a copy at T is invisible until it is activated
          DedupeFirst,  \* T has the dedupe rows of the range before it accepts a publish
          FenceFirst,   \* copies are collected only after the epoch was raised at S
          CheckOwner    \* an abort reads the map row of S after the epoch was raised there

Ids == Old \cup New
Movers == 1..MaxEpoch
Nothing == [epoch |-> 0, version |-> 0]

VARIABLES
  epochC, epochS, epochT, \* the fence rows of the coordinator and of both owners
  ownsS, ownsT,           \* whether the shard's own map row gives it the range
  atS, atT,               \* state of each message: none, waiting, claimed, done
  version,                \* number of changes of the row at S
  claims,
  dedupeS, dedupeT,
  moved,                  \* at S: the epoch of the mover that removed the message; 0: not moved
  incoming,               \* at T: copies that no claim sees
  pc, memory, seen,       \* of each mover: its place, the copy it holds, the moved rows that it has read
  publish,                \* of each publisher: its place
  stored                  \* how often a message was accepted

vars == <<epochC, epochS, epochT, ownsS, ownsT, atS, atT, version, claims, dedupeS, dedupeT, moved, incoming,
          pc, memory, seen, publish, stored>>
fences == <<epochC, epochS, epochT>>
maps == <<ownsS, ownsT>>
rows == <<atS, atT, version, claims, moved, incoming>>
names == <<dedupeS, dedupeT>>
own == <<pc, memory, seen>>
clients == <<publish, stored>>

Init ==
  /\ epochC = 0 /\ epochS = 0 /\ epochT = 0
  /\ ownsS = TRUE /\ ownsT = FALSE
  /\ atS = [m \in Ids |-> IF m \in Old THEN "waiting" ELSE "none"]
  /\ atT = [m \in Ids |-> "none"]
  /\ version = [m \in Ids |-> 0] /\ claims = [m \in Ids |-> 0]
  /\ dedupeS = Old /\ dedupeT = {}
  /\ moved = [m \in Ids |-> 0] /\ incoming = [m \in Ids |-> Nothing]
  /\ pc = [e \in Movers |-> "idle"]
  /\ memory = [e \in Movers |-> [m \in Ids |-> Nothing]]
  /\ seen = [e \in Movers |-> [m \in Ids |-> 0]]
  /\ publish = [p \in Publishers |-> "idle"]
  /\ stored = [m \in Ids |-> IF m \in Old THEN 1 ELSE 0]

Live(state) == state \in {"waiting", "claimed"}
VisibleAtT(m) == Live(atT[m]) \/ (~HideCopies /\ incoming[m] # Nothing)

(* --- publishers: the shard's own map row decides, whatever map the client has ------------------------------ *)

LockMap(p, shard) ==
  /\ publish[p] = "idle"
  /\ IF shard = "S" THEN ownsS ELSE ownsT
  /\ publish' = [publish EXCEPT ![p] = shard]
  /\ UNCHANGED <<fences, maps, rows, names, own, stored>>

Publish(p, m) ==
  /\ publish[p] \in {"S", "T"}
  /\ publish' = [publish EXCEPT ![p] = "done"]
  /\ IF publish[p] = "S"
     THEN /\ dedupeS' = dedupeS \cup {m} /\ UNCHANGED dedupeT
          /\ IF m \in dedupeS THEN UNCHANGED <<atS, stored>>
             ELSE atS' = [atS EXCEPT ![m] = "waiting"] /\ stored' = [stored EXCEPT ![m] = @ + 1]
          /\ UNCHANGED atT
     ELSE /\ dedupeT' = dedupeT \cup {m} /\ UNCHANGED dedupeS
          /\ IF m \in dedupeT THEN UNCHANGED <<atT, stored>>
             ELSE atT' = [atT EXCEPT ![m] = "waiting"] /\ stored' = [stored EXCEPT ![m] = @ + 1]
          /\ UNCHANGED atS
  /\ UNCHANGED <<fences, maps, version, claims, moved, incoming, own>>

(* --- workers ------------------------------------------------------------------------------------------------ *)

Claim(m) ==
  /\ claims[m] < MaxClaims
  /\ \/ /\ atS[m] = "waiting" /\ atS' = [atS EXCEPT ![m] = "claimed"]
        /\ version' = [version EXCEPT ![m] = @ + 1] /\ UNCHANGED atT
     \/ /\ atT[m] = "waiting" /\ atT' = [atT EXCEPT ![m] = "claimed"] /\ UNCHANGED <<atS, version>>
  /\ claims' = [claims EXCEPT ![m] = @ + 1]
  /\ UNCHANGED <<fences, maps, names, moved, incoming, own, clients>>

Settle(m) ==
  /\ \E next \in {"waiting", "done"} :
     \/ /\ atS[m] = "claimed" /\ atS' = [atS EXCEPT ![m] = next]
        /\ version' = [version EXCEPT ![m] = @ + 1] /\ UNCHANGED atT
     \/ /\ atT[m] = "claimed" /\ atT' = [atT EXCEPT ![m] = next] /\ UNCHANGED <<atS, version>>
  /\ UNCHANGED <<fences, maps, names, claims, moved, incoming, own, clients>>

(* --- a mover ------------------------------------------------------------------------------------------------ *)

At(e, place) == pc[e] = place
Goto(e, place) == pc' = [pc EXCEPT ![e] = place]

Begin(e) ==
  /\ At(e, "idle") /\ epochC = e - 1 /\ epochC' = e
  /\ Goto(e, "fence source")
  /\ UNCHANGED <<epochS, epochT, maps, rows, names, memory, seen, clients>>

FenceSource(e) ==
  /\ At(e, "fence source") /\ epochS <= e
  /\ epochS' = IF FenceFirst THEN e ELSE epochS
  /\ Goto(e, "fence target")
  /\ UNCHANGED <<epochC, epochT, maps, rows, names, memory, seen, clients>>

FenceTarget(e) ==
  /\ At(e, "fence target") /\ epochT <= e /\ epochT' = e
  /\ Goto(e, "read moved")
  /\ UNCHANGED <<epochC, epochS, maps, rows, names, memory, seen, clients>>

ReadMoved(e) ==
  /\ At(e, "read moved") /\ seen' = [seen EXCEPT ![e] = moved]
  /\ Goto(e, "collect")
  /\ UNCHANGED <<fences, maps, rows, names, memory, clients>>

(* Copies of earlier movers: those that were removed from S are activated, all others are deleted. *)
Collect(e) ==
  /\ At(e, "collect") /\ epochT = e
  /\ atT' = [m \in Ids |-> IF incoming[m] # Nothing /\ seen[e][m] = incoming[m].epoch THEN "waiting" ELSE atT[m]]
  /\ incoming' = [m \in Ids |-> Nothing]
  /\ epochS' = IF FenceFirst THEN epochS ELSE IF epochS < e THEN e ELSE epochS
  /\ Goto(e, "switch source")
  /\ UNCHANGED <<epochC, epochT, maps, atS, version, claims, moved, names, memory, seen, clients>>

SwitchSource(e) ==
  /\ At(e, "switch source") /\ epochS = e
  /\ LockRange => \A p \in Publishers : publish[p] # "S"
  /\ ownsS' = FALSE /\ UNCHANGED ownsT
  /\ Goto(e, IF DedupeFirst THEN "copy dedupe" ELSE "switch target")
  /\ UNCHANGED <<fences, rows, names, memory, seen, clients>>

CopyDedupe(e) ==
  /\ At(e, "copy dedupe") /\ epochT = e
  /\ dedupeT' = dedupeT \cup dedupeS
  /\ Goto(e, IF DedupeFirst THEN "switch target" ELSE "next")
  /\ UNCHANGED <<fences, maps, rows, dedupeS, memory, seen, clients>>

SwitchTarget(e) ==
  /\ At(e, "switch target") /\ epochT = e
  /\ ownsT' = TRUE /\ UNCHANGED ownsS
  /\ Goto(e, IF DedupeFirst THEN "next" ELSE "copy dedupe")
  /\ UNCHANGED <<fences, rows, names, memory, seen, clients>>

Read(e, m) ==
  /\ At(e, "next") /\ atS[m] = "waiting"
  /\ memory' = [memory EXCEPT ![e] = [n \in Ids |-> IF n = m
                 THEN [epoch |-> e, version |-> version[m]] ELSE Nothing]]
  /\ Goto(e, "copy")
  /\ UNCHANGED <<fences, maps, rows, names, seen, clients>>

Copy(e, m) ==
  /\ At(e, "copy") /\ memory[e][m] # Nothing /\ epochT = e
  /\ incoming' = [incoming EXCEPT ![m] = memory[e][m]]
  /\ Goto(e, "remove")
  /\ UNCHANGED <<fences, maps, atS, atT, version, claims, moved, names, memory, seen, clients>>

(* One transaction at S: check the epoch and the row, delete it, record it as moved. *)
Remove(e, m) ==
  /\ At(e, "remove") /\ memory[e][m] # Nothing
  /\ CheckEpoch => epochS = e
  /\ IF IF CheckRows THEN atS[m] = "waiting" /\ version[m] = memory[e][m].version ELSE Live(atS[m])
     THEN atS' = [atS EXCEPT ![m] = "none"] /\ moved' = [moved EXCEPT ![m] = e]
     ELSE UNCHANGED <<atS, moved>>
  /\ Goto(e, "finish")
  /\ UNCHANGED <<fences, maps, atT, version, claims, incoming, names, memory, seen, clients>>

(* One transaction at T: the copies that were removed from S become messages, the others are deleted. *)
Activate(e, m) ==
  /\ At(e, "finish") /\ memory[e][m] # Nothing /\ epochT = e
  /\ atT' = IF moved[m] = e /\ incoming[m] # Nothing THEN [atT EXCEPT ![m] = "waiting"] ELSE atT
  /\ incoming' = [incoming EXCEPT ![m] = Nothing]
  /\ memory' = [memory EXCEPT ![e][m] = Nothing]
  /\ Goto(e, "next")
  /\ UNCHANGED <<fences, maps, atS, version, claims, moved, names, seen, clients>>

End(e) ==
  /\ At(e, "next") /\ \A m \in Ids : ~Live(atS[m]) /\ epochC = e
  /\ Goto(e, "ended")
  /\ UNCHANGED <<fences, maps, rows, names, memory, seen, clients>>

(* An operator undoes the change: a mover that fences and collects like the others, and ends if S still has the range. *)
ReadOwner(e) ==
  /\ e \in Aborters /\ At(e, "switch source")
  /\ CheckOwner => ownsS
  /\ Goto(e, "end abort")
  /\ UNCHANGED <<fences, maps, rows, names, memory, seen, clients>>

EndAbort(e) ==
  /\ At(e, "end abort") /\ epochC = e
  /\ Goto(e, "aborted")
  /\ UNCHANGED <<fences, maps, rows, names, memory, seen, clients>>

(* kill -9. The last mover lives: a range moves to its end only if some operator lets it. *)
Die(e) ==
  /\ e < MaxEpoch /\ pc[e] \notin {"idle", "dead", "ended", "aborted"}
  /\ Goto(e, "dead")
  /\ UNCHANGED <<fences, maps, rows, names, memory, seen, clients>>

Mover(e) ==
  \/ Begin(e) \/ FenceSource(e) \/ FenceTarget(e) \/ ReadMoved(e) \/ Collect(e)
  \/ SwitchSource(e) \/ CopyDedupe(e) \/ SwitchTarget(e) \/ End(e) \/ ReadOwner(e) \/ EndAbort(e)
  \/ \E m \in Ids : Read(e, m) \/ Copy(e, m) \/ Remove(e, m) \/ Activate(e, m)

Next ==
  \/ \E e \in Movers : Mover(e) \/ Die(e)
  \/ \E p \in Publishers : \/ \E shard \in {"S", "T"} : LockMap(p, shard)
                           \/ \E m \in New : Publish(p, m)
  \/ \E m \in Ids : Claim(m) \/ Settle(m)

Fairness ==
  /\ \A e \in Movers : WF_vars(Mover(e))
  /\ \A p \in Publishers : WF_vars(\E m \in New : Publish(p, m)) /\ WF_vars(LockMap(p, "S") \/ LockMap(p, "T"))
  /\ \A m \in Ids : WF_vars(Settle(m))
Spec == Init /\ [][Next]_vars /\ Fairness

(* --- safety ------------------------------------------------------------------------------------------------- *)

VisibleOnce == \A m \in Ids : ~(Live(atS[m]) /\ VisibleAtT(m))
HandledOnce == \A m \in Ids : stored[m] <= 1 /\ ~(atS[m] = "done" /\ (VisibleAtT(m) \/ atT[m] = "done"))
NeverLost == \A m \in Ids : stored[m] > 0 =>
  \/ atS[m] # "none" \/ atT[m] # "none"
  \/ moved[m] # 0 /\ incoming[m] # Nothing /\ incoming[m].epoch = moved[m]
OneOwner == ~(ownsS /\ ownsT)
(* After the switch the messages at S only become fewer. *)
NoLatePublish == [][~ownsS => \A m \in Ids : atS[m] = "none" => atS'[m] = "none"]_vars

(* Only a message that waits is taken away from S, and its copy is not older than its last change. *)
NothingOverwritten == [][\A m \in Ids : moved'[m] # moved[m] =>
  atS[m] = "waiting" /\ incoming[m].version = version[m]]_vars

(* An abort that succeeds leaves everything at S. *)
AbortKeeps == [][\A e \in Movers : pc'[e] = "aborted" /\ pc[e] # "aborted" =>
  ownsS /\ \A m \in Ids : incoming[m] = Nothing]_vars

(* --- liveness ----------------------------------------------------------------------------------------------- *)

VisibleAgain == \A m \in Ids : (moved[m] # 0) ~> (atT[m] # "none")
Ends == <>[](\A m \in Ids : ~Live(atS[m]) /\ incoming[m] = Nothing)
Published == \A p \in Publishers : <>(publish[p] = "done")
==========================================================================
