-- Work of handlers outside of transactions: the delivery that owns a step, and its result once it is done.
CREATE TABLE {step} (
  id uuid PRIMARY KEY,
  scope text NOT NULL,
  name text NOT NULL,
  message uuid NOT NULL,
  token bigint NOT NULL,
  result bytea,
  at bigint NOT NULL
);

CREATE INDEX {prefix}step_at ON {step} (at);
