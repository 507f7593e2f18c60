-- Running messages that an operator has cancelled. Their workers read this.
CREATE TABLE {cancel} (
  id uuid NOT NULL PRIMARY KEY,
  token bigint NOT NULL,
  reason text NOT NULL
);
