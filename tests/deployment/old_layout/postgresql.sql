
CREATE TABLE IF NOT EXISTS "message_migration" (version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL, applied_at BIGINT NOT NULL);

CREATE TABLE "message" (
  id uuid NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  lease bigint,
  lease_until bigint,
  token bigint,
  worker bigint,
  written xid8 DEFAULT pg_current_xact_id(),
  deliveries integer NOT NULL DEFAULT 0,
  attempts integer NOT NULL DEFAULT 0,
  crashes integer NOT NULL DEFAULT 0,
  priority smallint NOT NULL,
  lane smallint NOT NULL,
  ahead smallint NOT NULL DEFAULT 0,
  state text COLLATE "C" NOT NULL CHECK (state IN ('PENDING', 'PROCESSING', 'RETRYABLE')),
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  last_error text,
  payload bytea NOT NULL,
  PRIMARY KEY (id) WITH (fillfactor = 45)
) WITH (
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_scale_factor = 0.2,
  autovacuum_analyze_threshold = 10000,
  vacuum_truncate = off
);

CREATE INDEX message_claim ON "message" (queue, lane, due_at, id) WHERE state <> 'PROCESSING';

CREATE INDEX message_appeared ON "message" (queue, written) WHERE written IS NOT NULL;

CREATE INDEX message_lease ON "message" (lease_until, worker, token) WHERE state = 'PROCESSING';

CREATE FUNCTION message_placed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NEW.lane = OLD.lane THEN
    NEW.lane := OLD.lane - OLD.priority + NEW.priority;
  END IF;
  NEW.written := CASE WHEN NEW.state <> 'PROCESSING' THEN pg_current_xact_id() END;
  RETURN NEW;
END $$;

REVOKE ALL ON FUNCTION message_placed() FROM PUBLIC;

CREATE TRIGGER message_placed BEFORE UPDATE OF state, queue, lane, due_at, priority ON "message"
FOR EACH ROW WHEN (NEW.written IS NOT DISTINCT FROM OLD.written AND (
  (NEW.written IS NULL) = (NEW.state <> 'PROCESSING')
  OR NEW.due_at <> OLD.due_at OR NEW.lane <> OLD.lane OR NEW.priority <> OLD.priority OR NEW.queue <> OLD.queue
)) EXECUTE FUNCTION message_placed();

CREATE TABLE "message_archive" (
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

CREATE TABLE "message_archive_default" PARTITION OF "message_archive" DEFAULT;

CREATE INDEX message_archive_queue ON "message_archive" (queue, state, archived_at, id);

CREATE INDEX message_archive_id ON "message_archive" (id);

CREATE TABLE "message_dedupe" (
  id uuid PRIMARY KEY,
  publisher bigint NOT NULL,
  expires_at bigint NOT NULL
);

CREATE INDEX message_dedupe_expiry ON "message_dedupe" (expires_at);

CREATE TABLE "message_once" (
  id uuid NOT NULL,
  key text COLLATE "C" NOT NULL,
  token bigint NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (id, key)
);

CREATE TABLE "message_queue" (
  name text COLLATE "C" PRIMARY KEY,
  paused smallint NOT NULL DEFAULT 0,
  keep_completed bigint,
  keep_failed bigint
);

CREATE TABLE "message_worker" (
  id bigint PRIMARY KEY,
  name text NOT NULL,
  started_at bigint NOT NULL,
  beat_at bigint NOT NULL,
  beats bigint NOT NULL,
  dead_after bigint NOT NULL,
  lease bigint NOT NULL,
  doubted_at bigint,
  by_lock smallint NOT NULL,
  stopping smallint NOT NULL
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (1, 'queue', (SELECT coalesce(NULL::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)));

CREATE TABLE "message_stream" (
  id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL UNIQUE,
  epoch bigint NOT NULL,
  acked_seq bigint NOT NULL,
  opened_at bigint
);

CREATE TABLE "message_stream_claim" (
  stream integer NOT NULL,
  seq bigint NOT NULL,
  claimed_at bigint NOT NULL,
  messages bigint NOT NULL,
  slices text NOT NULL,
  PRIMARY KEY (stream, seq)
);

CREATE TABLE "message_stream_message" (
  seq bigint NOT NULL,
  stream integer NOT NULL,
  id uuid NOT NULL,
  outcome text COLLATE "C" CHECK (outcome IN ('ack', 'nack', 'reject')),
  delay bigint,
  reason text,
  PRIMARY KEY (stream, seq, id)
) WITH (
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_cost_delay = 0,
  vacuum_truncate = off
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (2, 'streams', (SELECT coalesce(NULL::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)));

CREATE UNLOGGED TABLE "message_lot" (
  lot bigint PRIMARY KEY,
  batch bigint NOT NULL,
  at bigint NOT NULL,
  writer text COLLATE "C" NOT NULL
);

CREATE INDEX message_lot_writer ON "message_lot" (writer, batch);

CREATE UNLOGGED TABLE "message_staging" (
  lot bigint NOT NULL,
  id uuid NOT NULL,
  due_at bigint,
  priority smallint NOT NULL,
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  payload bytea NOT NULL
);

CREATE INDEX message_staging_lot ON "message_staging" (lot);

CREATE TABLE "message_written" (
  writer text COLLATE "C" NOT NULL,
  part integer NOT NULL,
  batch bigint NOT NULL,
  size bigint NOT NULL,
  at bigint NOT NULL,
  PRIMARY KEY (writer, part)
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (3, 'staging', (SELECT coalesce(NULL::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)));

CREATE TABLE "message_export" (
  lake text COLLATE "C" PRIMARY KEY,
  shard integer NOT NULL,
  until bigint,
  at bigint NOT NULL,
  path text NOT NULL
);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (4, 'exports', (SELECT coalesce(NULL::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)));

CREATE TABLE "message_export_range" (
  lake text COLLATE "C" NOT NULL,
  since bigint NOT NULL,
  until bigint NOT NULL,
  messages bigint NOT NULL,
  purged bigint NOT NULL,
  PRIMARY KEY (lake, since)
);

CREATE INDEX message_archive_time ON "message_archive" USING brin (archived_at)
  WITH (pages_per_range = 32, autosummarize = on);

INSERT INTO "message_migration" (version, name, applied_at) VALUES (5, 'export_ranges', (SELECT coalesce(NULL::bigint, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint)));
