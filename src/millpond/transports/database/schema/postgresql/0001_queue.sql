-- Times are microseconds since 1970 in UTC. Wide columns last: the narrow ones then need no padding.
CREATE TABLE {message} (
  id uuid NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  -- Length of the lease. Null: not claimed, or held by a stream.
  lease bigint,
  -- End of the lease. Null while the beats of the worker extend it.
  lease_until bigint,
  token bigint,
  worker bigint,
  -- The transaction that made the message wait, or moved it; NULL while it is claimed. A claim begins where the last
  -- one ended, and finds by it the rows that appear before that place.
  written xid8 DEFAULT pg_current_xact_id(),
  deliveries integer NOT NULL DEFAULT 0,
  attempts integer NOT NULL DEFAULT 0,
  crashes integer NOT NULL DEFAULT 0,
  priority smallint NOT NULL,
  lane smallint NOT NULL,
  -- 1: claimed while other messages waited for a handler, so it may not have been started.
  ahead smallint NOT NULL DEFAULT 0,
  state text COLLATE "C" NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  last_error text,
  payload bytea NOT NULL,
  -- Half empty: a claim writes each row anew, with another entry of the same id, and then no page splits.
  PRIMARY KEY (id) WITH (fillfactor = 45),
  -- The lane is made of it, and claims read the lanes from 0 on.
  CONSTRAINT {prefix}message_priority CHECK (priority BETWEEN 0 AND 100),
  -- The years 1 to 9999: other times could not be shown.
  CONSTRAINT {prefix}message_times CHECK (created_at BETWEEN -62135596800000000 AND 253402300799999999
    AND due_at BETWEEN -62135596800000000 AND 253402300799999999 AND expires_at BETWEEN -62135596800000000 AND 253402300799999999)
) WITH (
  -- A queue's rows live for a short time: vacuum often and at full speed, and analyze little, since no plan depends on
  -- its statistics.
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0.2,
  autovacuum_analyze_threshold = 10000,
  -- The empty end of the table is soon filled again, and giving it back locks the table for a short time.
  vacuum_truncate = off
);

-- Rows that a claim reads, in its order. Claimed rows are not in it, however many there are.
CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id) WHERE state <> 'PROCESSING';

-- Rows that were written after a given transaction. Its condition differs from that of the index above: a plan made
-- while the table is empty can then not confuse them.
CREATE INDEX {prefix}message_appeared ON {message} (queue, written) WHERE written IS NOT NULL;

CREATE INDEX {prefix}message_lease ON {message} (lease_until, worker, token) WHERE state = 'PROCESSING';

-- For every UPDATE that does not set `written` itself: give-backs, reschedules, and those of other programs. A new
-- priority moves the message to its lane.
CREATE FUNCTION {schema_dot}{prefix}message_placed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NEW.lane = OLD.lane THEN
    NEW.lane := OLD.lane - OLD.priority + NEW.priority;
  END IF;
  NEW.written := CASE WHEN NEW.state <> 'PROCESSING' THEN pg_current_xact_id() END;
  RETURN NEW;
END $$;

REVOKE ALL ON FUNCTION {schema_dot}{prefix}message_placed() FROM PUBLIC;

CREATE TRIGGER {prefix}message_placed BEFORE UPDATE OF state, queue, lane, due_at, priority ON {message}
FOR EACH ROW WHEN (NEW.written IS NOT DISTINCT FROM OLD.written AND (
  (NEW.written IS NULL) = (NEW.state <> 'PROCESSING')
  OR NEW.due_at <> OLD.due_at OR NEW.lane <> OLD.lane OR NEW.priority <> OLD.priority OR NEW.queue <> OLD.queue
)) EXECUTE FUNCTION {schema_dot}{prefix}message_placed();

CREATE TABLE {archive} (
  id uuid NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  archived_at bigint NOT NULL,
  token bigint,
  deliveries integer NOT NULL,
  attempts integer NOT NULL,
  priority smallint NOT NULL,
  state text COLLATE "C" NOT NULL CHECK (state IN ('COMPLETED', 'FAILED')),
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  reason text,
  error text,
  headers text,
  payload bytea NOT NULL
) PARTITION BY RANGE (archived_at);

-- Takes rows of days that have no partition; purge makes those ahead.
CREATE TABLE {archive_default} PARTITION OF {archive} DEFAULT;

CREATE INDEX {prefix}archive_queue ON {archive} (queue, state, archived_at, id);

CREATE INDEX {prefix}archive_id ON {archive} (id);

CREATE TABLE {dedupe} (
  id uuid PRIMARY KEY,
  publisher bigint NOT NULL,
  expires_at bigint NOT NULL
);

CREATE INDEX {prefix}dedupe_expiry ON {dedupe} (expires_at);

-- Work that handlers did once, by message and by the handler's key.
CREATE TABLE {once} (
  id uuid NOT NULL,
  key text COLLATE "C" NOT NULL,
  token bigint NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (id, key)
);

CREATE TABLE {queue} (
  name text COLLATE "C" PRIMARY KEY,
  paused smallint NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
  keep_completed bigint CHECK (keep_completed BETWEEN 0 AND 3153600000000000),
  keep_failed bigint CHECK (keep_failed BETWEEN 0 AND 3153600000000000)
);

CREATE TABLE {worker} (
  id bigint PRIMARY KEY,
  name text NOT NULL,
  started_at bigint NOT NULL,
  beat_at bigint NOT NULL,
  -- Number of the last beat: it changes with each one, also if the clock is set back.
  beats bigint NOT NULL,
  -- Time of silence after which the worker is dead if its lock is free.
  dead_after bigint NOT NULL,
  -- Shortest lease of its claims, 0: unknown. No reaper reads them before it was silent for that time.
  lease bigint NOT NULL,
  -- When a reaper began to doubt that it lives. Null since its last beat.
  doubted_at bigint,
  -- 1: its lock shows whether it lives; 0: its session keeps changing, so only its leases do.
  by_lock smallint NOT NULL,
  -- 1: it is stopping; its death is no crash of its messages.
  stopping smallint NOT NULL
);
