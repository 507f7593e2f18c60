-- The lane follows the priority and the crashes by itself: UPDATE … SET priority takes effect in claims.
DROP TRIGGER {prefix}message_placed ON {message};

ALTER TABLE {message} DROP COLUMN lane;

-- The priority, and 1000 more for a suspect. Claims take the lowest lane first.
ALTER TABLE {message} ADD COLUMN lane smallint NOT NULL
  GENERATED ALWAYS AS (priority + CASE WHEN crashes >= 2 THEN 1000 ELSE 0 END) STORED;

CREATE INDEX {prefix}message_claim ON {message} (queue, lane, due_at, id) WHERE state <> 'PROCESSING';

CREATE OR REPLACE FUNCTION {schema_dot}{prefix}message_placed() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  NEW.written := CASE WHEN NEW.state <> 'PROCESSING' THEN pg_current_xact_id() END;
  RETURN NEW;
END $$;

CREATE TRIGGER {prefix}message_placed BEFORE UPDATE OF state, queue, due_at, priority, crashes ON {message}
FOR EACH ROW WHEN (NEW.written IS NOT DISTINCT FROM OLD.written AND (
  (NEW.written IS NULL) = (NEW.state <> 'PROCESSING')
  OR NEW.due_at <> OLD.due_at OR NEW.priority <> OLD.priority OR NEW.crashes <> OLD.crashes OR NEW.queue <> OLD.queue
)) EXECUTE FUNCTION {schema_dot}{prefix}message_placed();
