-- One row if this database is a shard of several: its name there, and the shard map, which every shard has.
CREATE TABLE {shard} (
  id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
  name TEXT NOT NULL,
  pond TEXT NOT NULL,
  version INTEGER NOT NULL,
  map TEXT NOT NULL
) WITHOUT ROWID;

-- The fence of movers: a write of a mover with a lower epoch is refused. `pending`: the pending change of the map.
CREATE TABLE {moving} (
  id INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
  epoch INTEGER NOT NULL,
  pending TEXT
) WITHOUT ROWID;

-- Copies of messages of another shard. No claim sees them until the mover has removed them there.
CREATE TABLE {incoming} (
  id BLOB NOT NULL PRIMARY KEY,
  source TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  due_at INTEGER NOT NULL,
  expires_at INTEGER,
  first_attempt_at INTEGER,
  last_attempt_at INTEGER,
  acquired_at INTEGER,
  deliveries INTEGER NOT NULL,
  attempts INTEGER NOT NULL,
  crashes INTEGER NOT NULL,
  priority INTEGER NOT NULL,
  state TEXT NOT NULL,
  queue TEXT NOT NULL,
  key TEXT,
  headers TEXT,
  last_error TEXT,
  history TEXT,
  payload BLOB NOT NULL
);

-- Messages that were removed here because another shard has them. Kept for a day.
CREATE TABLE {moved} (
  id BLOB NOT NULL PRIMARY KEY,
  epoch INTEGER NOT NULL,
  target TEXT NOT NULL,
  at INTEGER NOT NULL
) WITHOUT ROWID;
