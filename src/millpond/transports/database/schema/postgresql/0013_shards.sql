-- One row if this database is a shard of several: its name there, and the shard map, which every shard has.
CREATE TABLE {shard} (
  id bigint NOT NULL PRIMARY KEY CHECK (id = 1),
  name text NOT NULL,
  pond text NOT NULL,
  version bigint NOT NULL,
  map text NOT NULL
);

-- The fence of movers: a write of a mover with a lower epoch is refused. `pending`: the pending change of the map.
CREATE TABLE {moving} (
  id bigint NOT NULL PRIMARY KEY CHECK (id = 1),
  epoch bigint NOT NULL,
  pending text
);

-- Copies of messages of another shard. No claim sees them until the mover has removed them there.
CREATE TABLE {incoming} (
  id uuid NOT NULL PRIMARY KEY,
  source text NOT NULL,
  epoch bigint NOT NULL,
  created_at bigint NOT NULL,
  due_at bigint NOT NULL,
  expires_at bigint,
  first_attempt_at bigint,
  last_attempt_at bigint,
  acquired_at bigint,
  deliveries integer NOT NULL,
  attempts integer NOT NULL,
  crashes integer NOT NULL,
  priority smallint NOT NULL,
  state text COLLATE "C" NOT NULL,
  queue text COLLATE "C" NOT NULL,
  key text COLLATE "C",
  headers text,
  last_error text,
  history text,
  payload bytea NOT NULL
);

-- Messages that were removed here because another shard has them. Kept for a day.
CREATE TABLE {moved} (
  id uuid NOT NULL PRIMARY KEY,
  epoch bigint NOT NULL,
  target text NOT NULL,
  at bigint NOT NULL
);
