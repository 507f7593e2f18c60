-- SQL as an interface: see docs/how-to/sql.md. A function finds only the server's own functions and operators, and names
-- ours with their schema: an account that may create functions there could otherwise run them with the owner's rights.

-- The time in microseconds: not that of the caller's statement, which may have begun long ago, and an export of the
-- archive would not wait for it. A test that owns the tables may set it: SET millpond.now = '…'. Another account may not:
-- these functions have the owner's rights.
CREATE FUNCTION {schema_dot}"{prefix}clock"() RETURNS bigint LANGUAGE sql VOLATILE SECURITY DEFINER
RETURN CASE WHEN coalesce(current_setting('millpond.now', true), '') <> ''
    AND pg_has_role(session_user, current_user, 'MEMBER')
  THEN current_setting('millpond.now')::bigint ELSE (extract(epoch FROM clock_timestamp()) * 1000000)::bigint END;

CREATE FUNCTION {schema_dot}"{prefix}moment"(at bigint) RETURNS timestamptz LANGUAGE sql STABLE
RETURN timestamptz '1970-01-01 00:00:00+00' + at::double precision * interval '1 microsecond';

-- The channel on which publishers notify waiting consumers, with the queue's name.
CREATE FUNCTION {schema_dot}"{prefix}channel"() RETURNS text LANGUAGE sql IMMUTABLE RETURN '{channel}';

-- A body as text; NULL if it is no text in UTF-8.
CREATE FUNCTION {schema_dot}"{prefix}body_text"(payload bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN OTHERS THEN
  RETURN NULL;
END $$;

-- Headers as JSON; NULL if they are no JSON object. Not jsonb: it refuses the character U+0000, which a header may have.
CREATE FUNCTION {schema_dot}"{prefix}headers_json"(headers text) RETURNS json LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN CASE WHEN json_typeof(headers::json) = 'object' THEN headers::json END;
EXCEPTION WHEN OTHERS THEN
  RETURN NULL;
END $$;

CREATE FUNCTION {schema_dot}"{prefix}refuse"(reason text) RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION '%', reason USING ERRCODE = 'invalid_parameter_value';
END $$;

-- Enters the id of a publisher; false if it was published within the last seven days.
CREATE FUNCTION {schema_dot}"{prefix}remember"(given uuid) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  at bigint := {schema_dot}"{prefix}clock"();
  since bigint := at - 604800000000;
BEGIN
  INSERT INTO {dedupe} AS d (id, publisher, expires_at) VALUES (given, 0, at + 604800000000)
  ON CONFLICT (id) DO UPDATE SET publisher = excluded.publisher, expires_at = excluded.expires_at
  WHERE d.expires_at <= at;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  RETURN (SELECT 1 FROM {message} m WHERE m.id = given) IS NULL
    AND (SELECT 1 FROM {archive} a WHERE a.id = given AND a.archived_at > since LIMIT 1) IS NULL;
END $$;

-- INSERT publishes. It has no rows: publishers need no right to read.
CREATE VIEW {publish} AS
SELECT NULL::uuid AS id, NULL::text AS queue, NULL::text AS body, NULL::text AS key, NULL::integer AS priority,
  NULL::timestamptz AS due_at, NULL::double precision AS delay, NULL::timestamptz AS expires_at,
  NULL::json AS headers, NULL::bytea AS payload
WHERE false;

-- A rule, not a trigger: one statement remains one statement, however many rows it has. OFFSET 0: each expression of
-- the caller is evaluated once. Ids are UUIDv7 with the microsecond in them, and sort in the order of rows. The clock is
-- read outside the subquery: PostgreSQL evaluates the subquery once for all rows if it is made of constants only.
CREATE RULE "{prefix}publish" AS ON INSERT TO {publish} DO INSTEAD
INSERT INTO {message} (id, queue, key, priority, headers, payload, due_at, expires_at, state, created_at)
SELECT coalesce(n.id, (overlay(lpad(to_hex((date_part('epoch', clock_timestamp()) * 4096000::double precision)::bigint),
    15, '0') PLACING '7' FROM 13 FOR 0) || substr(gen_random_uuid()::text, 20))::uuid),
  CASE WHEN n.queue <> '' AND n.queue !~ '^\s|\s$' AND length(n.queue) <= 255 THEN n.queue
    ELSE {schema_dot}"{prefix}refuse"('queue must have 1 to 255 characters and no white space at its ends') END,
  CASE WHEN n.key IS NULL OR length(n.key) <= 255 THEN n.key
    ELSE {schema_dot}"{prefix}refuse"('key must have at most 255 characters') END,
  CASE WHEN n.priority IS NULL THEN 50::smallint WHEN n.priority >= 0 AND n.priority <= 100 THEN n.priority::smallint
    ELSE {schema_dot}"{prefix}refuse"('priority must be an integer from 0 (first) to 100 (last)')::smallint END,
  CASE WHEN n.headers IS NULL OR json_typeof(n.headers) = 'object' THEN n.headers::text
    ELSE {schema_dot}"{prefix}refuse"('headers must be a JSON object') END,
  CASE WHEN n.body IS NULL AND n.payload IS NULL OR n.body IS NOT NULL AND n.payload IS NOT NULL
    THEN {schema_dot}"{prefix}refuse"('give body (text or JSON) or payload (bytes)')::bytea
    WHEN n.body IS NULL THEN n.payload ELSE convert_to(n.body, 'UTF8') END,
  CASE WHEN n.due_at IS NULL AND n.delay IS NULL THEN n.at
    WHEN n.due_at IS NOT NULL AND n.delay IS NOT NULL OR n.delay < 0::double precision
      OR n.delay > 3153600000::double precision
    THEN {schema_dot}"{prefix}refuse"('give due_at, or a delay of 0 seconds to 100 years')::bigint
    WHEN n.due_at < '0001-01-01 00:00:00+00' OR n.due_at >= '10000-01-01 00:00:00+00'
    THEN {schema_dot}"{prefix}refuse"('due_at must be in the years 1 to 9999')::bigint
    WHEN n.delay IS NULL THEN (extract(epoch FROM n.due_at) * 1000000)::bigint
    ELSE n.at + (n.delay * 1000000::double precision)::bigint END,
  CASE WHEN n.expires_at < '0001-01-01 00:00:00+00' OR n.expires_at >= '10000-01-01 00:00:00+00'
    THEN {schema_dot}"{prefix}refuse"('expires_at must be in the years 1 to 9999')::bigint
    ELSE (extract(epoch FROM n.expires_at) * 1000000)::bigint END, 'PENDING', n.at
FROM (SELECT NEW.id AS id, NEW.queue AS queue, NEW.body AS body, NEW.key AS key, NEW.priority AS priority,
    NEW.due_at AS due_at, NEW.delay AS delay, NEW.expires_at AS expires_at, NEW.headers AS headers,
    NEW.payload AS payload, (SELECT {schema_dot}"{prefix}clock"()) AS at OFFSET 0) n
WHERE (n.id IS NULL OR {schema_dot}"{prefix}remember"(n.id))
AND (n.queue IS NULL OR pg_notify('{channel}', n.queue) IS NOT NULL)
RETURNING id, queue, NULL::text, key, priority::integer, {schema_dot}"{prefix}moment"(due_at), NULL::double precision,
  {schema_dot}"{prefix}moment"(expires_at), NULL::json, NULL::bytea;

-- Publishes one message; `new` is false if its id was published before.
CREATE FUNCTION {schema_dot}"{prefix}publish"(queue text, body text DEFAULT NULL, id uuid DEFAULT NULL,
  key text DEFAULT NULL, priority integer DEFAULT NULL, due_at timestamptz DEFAULT NULL,
  delay double precision DEFAULT NULL, expires_at timestamptz DEFAULT NULL, headers jsonb DEFAULT NULL,
  payload bytea DEFAULT NULL, OUT message uuid, OUT new boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
<<f>>
DECLARE
  given uuid := id;
BEGIN
  INSERT INTO {publish} AS p (id, queue, body, key, priority, due_at, delay, expires_at, headers, payload)
  SELECT "{prefix}publish".id, "{prefix}publish".queue, "{prefix}publish".body, "{prefix}publish".key,
    "{prefix}publish".priority, "{prefix}publish".due_at, "{prefix}publish".delay, "{prefix}publish".expires_at,
    "{prefix}publish".headers::json, "{prefix}publish".payload RETURNING p.id INTO message;
  IF due_at IS NOT NULL THEN
    PERFORM set_config('millpond.queue', '', false);
  END IF;
  new := message IS NOT NULL;
  message := coalesce(message, given);
END $$;

-- Gives back messages whose own lease has lapsed; returns their number. Claims that a worker's row holds are left to
-- other workers, which observe its beats.
CREATE FUNCTION {schema_dot}"{prefix}reap"() RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
  at bigint := {schema_dot}"{prefix}clock"();
  reaped integer;
BEGIN
  UPDATE {message} SET {reaped} WHERE ctid = ANY(ARRAY(SELECT l.ctid FROM {message} l
    WHERE l.state = 'PROCESSING' AND l.lease_until > 0 AND l.lease_until <= at AND l.lease IS NOT NULL
    ORDER BY l.lease_until LIMIT 500 FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS reaped = ROW_COUNT;
  RETURN reaped;
END $$;

-- Locks due messages in the order of claims: up to `most` that are no suspects, or one suspect. They take turns.
-- The session remembers where its last full claim ended: the next one begins there and skips the dead rows before it.
-- At least once a second, and when there are too few messages behind that place, a claim reads from the beginning; also when
-- that place is of the future, because the clock was set back.
CREATE FUNCTION {schema_dot}"{prefix}find"(in_queue text, most integer, among uuid[], at bigint) RETURNS tid[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  moment bigint := (date_part('epoch', clock_timestamp()) * 1000000::double precision)::bigint;
  place text[] := string_to_array(nullif(current_setting('millpond.place', true), ''), ' ');
  place_lane integer;
  found_rows tid[] := ARRAY[]::tid[];
  next_rows tid[];
  in_lane integer := -1;
  next_lane integer;
  from_due bigint;
  from_id uuid;
  suspect tid;
BEGIN
  IF among IS NOT NULL THEN
    RETURN ARRAY(SELECT m.ctid FROM {message} m WHERE m.id = ANY(among) AND m.state || '' <> 'PROCESSING'
      AND m.queue || '' = in_queue AND m.due_at <= at
      ORDER BY m.lane, m.due_at, m.id LIMIT most FOR UPDATE SKIP LOCKED);
  END IF;
  SELECT m.ctid INTO suspect FROM {message} m WHERE m.queue = in_queue AND m.state <> 'PROCESSING'
    AND m.lane >= 1000 AND m.due_at <= at ORDER BY m.lane, m.due_at, m.id LIMIT 1 FOR UPDATE SKIP LOCKED;
  IF suspect IS NOT NULL AND coalesce(current_setting('millpond.turn', true), '') <> 'others' THEN
    PERFORM set_config('millpond.turn', 'others', false);
    RETURN ARRAY[suspect];
  END IF;
  IF place[1]::bigint BETWEEN moment - 1000000 AND moment AND current_setting('millpond.queue', true) = '{channel} ' || in_queue THEN
    moment := place[1]::bigint;
    place_lane := place[2]::integer;
  END IF;
  LOOP
    SELECT m.lane INTO next_lane FROM {message} m WHERE m.queue = in_queue AND m.state <> 'PROCESSING'
      AND m.lane > in_lane AND m.lane < CASE WHEN in_lane < place_lane THEN place_lane ELSE 1000 END
      ORDER BY m.lane LIMIT 1;
    IF next_lane IS NULL AND in_lane < place_lane THEN
      next_lane := place_lane;
    END IF;
    in_lane := next_lane;
    EXIT WHEN in_lane IS NULL;
    IF in_lane = place_lane THEN
      from_due := place[3]::bigint;
      from_id := place[4]::uuid;
    ELSE
      from_due := -9223372036854775807;
      from_id := '00000000-0000-0000-0000-000000000000';
    END IF;
    next_rows := ARRAY(SELECT m.ctid FROM {message} m WHERE m.queue = in_queue AND m.state <> 'PROCESSING'
      AND m.lane = in_lane AND m.due_at <= at AND (m.due_at, m.id) >= (from_due, from_id) ORDER BY m.due_at, m.id
      LIMIT most - cardinality(found_rows) FOR UPDATE SKIP LOCKED);
    found_rows := found_rows || next_rows;
    IF cardinality(found_rows) >= most THEN
      PERFORM set_config('millpond.queue', '{channel} ' || in_queue, false), set_config('millpond.place',
        moment || ' ' || in_lane || ' ' || m.due_at || ' ' || m.id, false)
      FROM {message} m WHERE m.ctid = found_rows[most];
      EXIT;
    END IF;
  END LOOP;
  IF place_lane IS NOT NULL AND cardinality(found_rows) < most THEN
    PERFORM set_config('millpond.queue', '', false);
    RETURN {schema_dot}"{prefix}find"(in_queue, most, among, at);
  END IF;
  IF suspect IS NOT NULL THEN
    PERFORM set_config('millpond.turn', 'suspect', false);
    IF cardinality(found_rows) = 0 THEN
      RETURN ARRAY[suspect];
    END IF;
  END IF;
  RETURN found_rows;
END $$;

-- Claims up to `most` due messages of a queue: lowest priority first, then oldest first; or one suspect alone.
-- Messages that have expired, were delivered too often, or whose headers are no JSON object, become FAILED and are not
-- returned; the claim then reads from the beginning, for the others that it found. Without a lease it is the queue's, or
-- 30 seconds.
CREATE FUNCTION {schema_dot}"{prefix}claim"(queue text, most integer DEFAULT 1, lease double precision DEFAULT NULL,
  ids uuid[] DEFAULT NULL)
RETURNS TABLE (id uuid, token bigint, body text, payload bytea, headers json, key text, priority integer,
  deliveries integer, attempts integer, crashes integer, created_at timestamptz, due_at timestamptz,
  first_attempt_at timestamptz, expires_at timestamptz, claimed_at timestamptz, leased_until timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  v_queue text := "{prefix}claim".queue;
  v_lease bigint := ("{prefix}claim".lease * 1000000::double precision)::bigint;
  v_ids uuid[] := "{prefix}claim".ids;
  is_paused smallint;
  v_limit integer;
  at bigint := {schema_dot}"{prefix}clock"();
  dice text := gen_random_uuid()::text;
  v_token bigint := ('x0' || right(dice, 12) || left(dice, 3))::bit(64)::bigint;
  rows tid[];
  unfit tid[];
BEGIN
  SELECT q.paused, nullif(q.max_deliveries, 0), coalesce(v_lease, q.lease) INTO is_paused, v_limit, v_lease
  FROM (SELECT) one LEFT JOIN {queue} q ON q.name = v_queue;
  v_lease := coalesce(v_lease, 30000000);
  IF v_queue IS NULL OR most IS NULL OR most < 0 OR v_lease <= 0 OR v_lease > 3153600000000000 THEN
    RAISE EXCEPTION 'claim needs a queue, a number of messages, and a lease of more than 0 seconds, at most 100 years'
      USING ERRCODE = 'invalid_parameter_value';
  END IF;
  IF most = 0 OR is_paused = 1 THEN
    RETURN;
  END IF;
  LOOP
    rows := {schema_dot}"{prefix}find"(v_queue, most, v_ids, at);
    IF cardinality(rows) < most AND (coalesce(current_setting('millpond.now', true), '') <> ''
      OR coalesce(nullif(current_setting('millpond.reaped', true), ''), '0')::bigint NOT BETWEEN at - 1000000 AND at) THEN
      PERFORM set_config('millpond.reaped', at::text, false);
      IF {schema_dot}"{prefix}reap"() > 0 THEN
        rows := {schema_dot}"{prefix}find"(v_queue, most, v_ids, at);
      END IF;
    END IF;
    -- Not the time before a wait for another table: an export would not wait for messages that are archived with it.
    at := {schema_dot}"{prefix}clock"();
    unfit := ARRAY(SELECT m.ctid FROM {message} m WHERE m.ctid = ANY(rows) AND (m.expires_at <= at
      OR m.deliveries >= v_limit OR m.headers IS NOT NULL AND {schema_dot}"{prefix}headers_json"(m.headers) IS NULL));
    EXIT WHEN cardinality(unfit) = 0;
    WITH gone AS (DELETE FROM {message} m WHERE m.ctid = ANY(unfit) RETURNING m.id, m.queue, m.key, m.priority,
      m.headers, m.payload, m.due_at, m.expires_at, m.deliveries + 1 AS deliveries, m.attempts, m.created_at,
      m.first_attempt_at, m.last_attempt_at, at AS acquired_at, v_token AS token, m.last_error, m.history)
    INSERT INTO {archive} ({archived}) SELECT {unfit} FROM gone g;
    PERFORM set_config('millpond.queue', '', false);
  END LOOP;
  RETURN QUERY WITH c AS (
    UPDATE {message} m SET state = 'PROCESSING', deliveries = m.deliveries + 1, token = v_token, worker = NULL,
      ahead = 0, acquired_at = at, lease = v_lease, lease_until = at + v_lease, written = NULL
    WHERE m.ctid = ANY(rows) RETURNING m.*),
  d AS (SELECT c.*, CASE WHEN octet_length(c.payload) < 100000000
      AND octet_length(encode(c.payload, 'escape')) = octet_length(c.payload)
    THEN convert_from(c.payload, 'UTF8') ELSE {schema_dot}"{prefix}body_text"(c.payload) END AS body FROM c)
  SELECT d.id, d.token, d.body, CASE WHEN d.body IS NULL THEN d.payload END,
    CASE WHEN d.headers IS NOT NULL THEN {schema_dot}"{prefix}headers_json"(d.headers) END, d.key, d.priority::integer,
    d.deliveries, d.attempts, d.crashes, {schema_dot}"{prefix}moment"(d.created_at), {schema_dot}"{prefix}moment"(d.due_at),
    {schema_dot}"{prefix}moment"(d.first_attempt_at), {schema_dot}"{prefix}moment"(d.expires_at),
    {schema_dot}"{prefix}moment"(d.acquired_at), {schema_dot}"{prefix}moment"(d.lease_until)
  FROM d ORDER BY d.lane, d.due_at, d.id;
END $$;

-- The stale ones of these receipts: neither still held, nor settled as in `good` by an earlier call.
CREATE FUNCTION {schema_dot}"{prefix}stale"(v_ids uuid[], v_token bigint, good text[]) RETURNS SETOF uuid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
SELECT r.id FROM unnest(v_ids) AS r(id)
WHERE (SELECT 1 FROM {message} m WHERE m.id = r.id AND m.token = v_token AND m.state = ANY(good)) IS NULL
AND (SELECT 1 FROM {archive} a WHERE a.id = r.id AND a.token = v_token AND a.state = ANY(good) LIMIT 1) IS NULL
$$;

-- Moves claimed messages into the archive; returns the stale receipts.
CREATE FUNCTION {schema_dot}"{prefix}archive"(v_ids uuid[], v_token bigint, v_state text, v_reason text, v_error text, keep boolean)
RETURNS SETOF uuid LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
  at bigint := {schema_dot}"{prefix}clock"();
  v_attempt text := CASE WHEN v_state = 'FAILED'
    THEN json_build_object('error', left(coalesce(v_error, v_reason), 500))::text END;
  v_failure bigint := CASE WHEN v_state = 'FAILED' THEN 0::bigint END;
  left_over uuid[] := v_ids;
  done uuid[];
BEGIN
  FOR try IN 1..2 LOOP
    WITH held AS MATERIALIZED (SELECT l.ctid FROM unnest(left_over) AS r(id), LATERAL (SELECT x.ctid FROM {message} x
      WHERE x.id = r.id AND x.token = v_token AND x.lease IS NOT NULL FOR UPDATE) l),
    gone AS (DELETE FROM {message} m WHERE m.ctid = ANY(ARRAY(SELECT h.ctid FROM held h)) RETURNING m.*),
    kept AS (INSERT INTO {archive} ({archived}) SELECT {settled} FROM gone g WHERE keep)
    SELECT array_agg(g.id) INTO done FROM gone g;
    IF done IS NOT NULL AND cardinality(done) = cardinality(left_over) THEN
      RETURN;
    END IF;
    left_over := ARRAY(SELECT DISTINCT u.id FROM unnest(left_over) AS u(id) WHERE done IS NULL OR u.id <> ALL(done));
  END LOOP;
  RETURN QUERY SELECT {schema_dot}"{prefix}stale"(left_over, v_token, ARRAY[v_state]);
END $$;

-- The wait of each held message by the queue's retry policy, in microseconds; NULL: its retries are used up. From a certain
-- exponent on the maximum applies anyway, and the power would be out of range.
CREATE FUNCTION {schema_dot}"{prefix}policy"(v_ids uuid[], v_token bigint) RETURNS TABLE (message uuid, wait bigint)
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
SELECT w.id, CASE WHEN (w.most = 0 OR w.attempts + 1 < w.most) AND (w.total IS NULL OR w.spent + w.wait <= w.total)
  THEN (w.wait * (1 - w.jitter) + (least(w.wait * (1 + w.jitter), w.maximum) - w.wait * (1 - w.jitter)) * random())::bigint
  END
FROM (SELECT x.id, x.attempts, coalesce(q.retry_attempts, 8) AS most, q.retry_total AS total,
    {schema_dot}"{prefix}clock"() - coalesce(x.first_attempt_at, x.acquired_at) AS spent, coalesce(q.retry_jitter, 0.33) AS jitter,
    coalesce(q.retry_maximum, 300000000)::double precision AS maximum,
    CASE WHEN k.n < 0 THEN 0::double precision ELSE least(coalesce(q.retry_maximum, 300000000)::double precision,
      k.initial * CASE WHEN k.initial = 0 OR k.multiplier = 1 THEN 1 ELSE power(k.multiplier, least(k.n::double precision,
        ln(greatest(coalesce(q.retry_maximum, 300000000) / k.initial, 1)) / ln(k.multiplier) + 1)) END
      + coalesce(q.retry_step, 0)::double precision * k.n) END AS wait
  FROM unnest(v_ids) AS r(id), LATERAL (SELECT m.* FROM {message} m
    WHERE m.id = r.id AND m.token = v_token AND m.lease IS NOT NULL) x LEFT JOIN {queue} q ON q.name = x.queue,
  LATERAL (SELECT x.attempts - CASE WHEN q.retry_first = 'immediate' THEN 1 ELSE 0 END AS n,
    coalesce(q.retry_initial, 1000000)::double precision AS initial,
    least(coalesce(q.retry_multiplier, 2), 1e16)::double precision AS multiplier) k) w
$$;

-- Gives claimed messages back to waiting, each after its delay (NULL: due as before); returns the stale receipts.
-- Waiting workers get a notice of messages that are due in less than two seconds; they read the due times of others.
CREATE FUNCTION {schema_dot}"{prefix}requeue"(v_ids uuid[], v_token bigint, v_state text, v_attempts integer, v_deliveries integer,
  delays bigint[], v_error text) RETURNS SETOF uuid LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
  at bigint := {schema_dot}"{prefix}clock"();
  v_crashes integer := 0;
  v_attempt text := CASE WHEN v_attempts = 1 THEN json_build_object('error', left(v_error, 500))::text END;
  done uuid[] := ARRAY[]::uuid[];
  more uuid[];
BEGIN
  PERFORM set_config('millpond.queue', '', false);
  FOR try IN 1..2 LOOP
    WITH held AS MATERIALIZED (SELECT l.ctid, r.delay FROM unnest(v_ids, delays) AS r(id, delay),
      LATERAL (SELECT x.ctid FROM {message} x
      WHERE x.id = r.id AND x.token = v_token AND x.lease IS NOT NULL FOR UPDATE) l),
    back AS (UPDATE {message} m SET {requeued}, written = pg_current_xact_id()
      FROM held h WHERE m.ctid = h.ctid RETURNING m.id, m.queue, m.due_at),
    soon AS MATERIALIZED (SELECT pg_notify('{channel}', q.queue) AS sent FROM
      (SELECT DISTINCT b.queue FROM back b WHERE b.due_at <= at + 2000000) q)
    SELECT array_agg(b.id) INTO more FROM back b WHERE (SELECT count(s.sent) FROM soon s) >= 0;
    done := done || more;
    IF cardinality(done) = cardinality(v_ids) THEN
      RETURN;
    END IF;
  END LOOP;
  RETURN QUERY SELECT {schema_dot}"{prefix}stale"(ARRAY(SELECT DISTINCT u.id FROM unnest(v_ids) AS u(id) WHERE u.id <> ALL(done)),
    v_token, ARRAY[v_state]);
END $$;

CREATE FUNCTION {schema_dot}"{prefix}extend_many"(ids uuid[], token bigint, lease double precision DEFAULT 30)
RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
  v_ids uuid[] := "{prefix}extend_many".ids;
  v_token bigint := "{prefix}extend_many".token;
  v_lease bigint := (coalesce("{prefix}extend_many".lease, 30) * 1000000::double precision)::bigint;
  at bigint := {schema_dot}"{prefix}clock"();
  extended bigint;
BEGIN
  IF v_lease < 0 OR v_lease > 3153600000000000 THEN
    RAISE EXCEPTION 'extend needs a lease of 0 seconds to 100 years' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  UPDATE {message} m SET lease = v_lease, lease_until = CASE WHEN m.lease_until IS NULL THEN NULL ELSE at + v_lease END
  WHERE m.id = ANY(v_ids) AND m.token = v_token AND m.lease IS NOT NULL;
  GET DIAGNOSTICS extended = ROW_COUNT;
  IF extended < cardinality(v_ids) THEN
    RETURN QUERY SELECT DISTINCT s FROM {schema_dot}"{prefix}stale"(v_ids, v_token, ARRAY['PROCESSING']) AS s;
  END IF;
END $$;

CREATE FUNCTION {schema_dot}"{prefix}ack_many"(ids uuid[], token bigint, keep boolean DEFAULT true) RETURNS SETOF uuid
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT {schema_dot}"{prefix}archive"(ids, token, 'COMPLETED', NULL, NULL, coalesce(keep, true))
$$;

CREATE FUNCTION {schema_dot}"{prefix}reject_many"(ids uuid[], token bigint, reason text DEFAULT 'rejected',
  error text DEFAULT NULL, keep boolean DEFAULT true) RETURNS SETOF uuid
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT {schema_dot}"{prefix}archive"(ids, token, 'FAILED', left(coalesce(reason, 'rejected'), 2048), left(error, 2048),
  coalesce(keep, true))
$$;

-- Without a delay the queue's retry policy decides: when the messages are due again, or that they are FAILED.
CREATE FUNCTION {schema_dot}"{prefix}nack_many"(ids uuid[], token bigint, delay double precision DEFAULT NULL,
  error text DEFAULT NULL) RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  over uuid[];
  again uuid[] := ids;
  waits bigint[];
BEGIN
  IF delay < 0 OR delay > 3153600000 THEN
    RAISE EXCEPTION 'the delay must be 0 seconds to 100 years' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  waits := array_fill((delay * 1000000::double precision)::bigint, ARRAY[coalesce(cardinality(ids), 0)]);
  IF delay IS NULL THEN
    SELECT array_agg(p.message) FILTER (WHERE p.wait IS NULL), array_agg(p.message) FILTER (WHERE p.wait IS NOT NULL),
      array_agg(p.wait) FILTER (WHERE p.wait IS NOT NULL) INTO over, again, waits FROM {schema_dot}"{prefix}policy"(ids, token) p;
    RETURN QUERY SELECT {schema_dot}"{prefix}stale"(ARRAY(SELECT DISTINCT u.id FROM unnest(ids) AS u(id)
      WHERE u.id <> ALL(coalesce(over, ARRAY[]::uuid[]) || coalesce(again, ARRAY[]::uuid[]))), token,
      ARRAY['RETRYABLE', 'FAILED']);
    IF over IS NOT NULL THEN
      RETURN QUERY SELECT {schema_dot}"{prefix}archive"(over, token, 'FAILED', 'retries used up', left(error, 2048), true);
    END IF;
  END IF;
  IF again IS NOT NULL THEN
    RETURN QUERY SELECT {schema_dot}"{prefix}requeue"(again, token, 'RETRYABLE', 1, 0, waits, left(error, 2048));
  END IF;
END $$;

-- Not done and not counted. Without a delay the messages are due as before.
CREATE FUNCTION {schema_dot}"{prefix}give_back_many"(ids uuid[], token bigint, delay double precision DEFAULT NULL)
RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF delay < 0 OR delay > 3153600000 THEN
    RAISE EXCEPTION 'the delay must be 0 seconds to 100 years' USING ERRCODE = 'invalid_parameter_value';
  END IF;
  RETURN QUERY SELECT {schema_dot}"{prefix}requeue"(ids, token, 'PENDING', 0, -1,
    array_fill((delay * 1000000::double precision)::bigint, ARRAY[coalesce(cardinality(ids), 0)]), NULL);
END $$;

-- The same for one message: true if the receipt was current.
CREATE FUNCTION {schema_dot}"{prefix}extend"(id uuid, token bigint, lease double precision DEFAULT 30) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT NOT EXISTS (SELECT {schema_dot}"{prefix}extend_many"(ARRAY[id], token, lease))
$$;

CREATE FUNCTION {schema_dot}"{prefix}ack"(id uuid, token bigint, keep boolean DEFAULT true) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT NOT EXISTS (SELECT {schema_dot}"{prefix}ack_many"(ARRAY[id], token, keep))
$$;

CREATE FUNCTION {schema_dot}"{prefix}nack"(id uuid, token bigint, delay double precision DEFAULT NULL,
  error text DEFAULT NULL) RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT NOT EXISTS (SELECT {schema_dot}"{prefix}nack_many"(ARRAY[id], token, delay, error))
$$;

CREATE FUNCTION {schema_dot}"{prefix}reject"(id uuid, token bigint, reason text DEFAULT 'rejected',
  error text DEFAULT NULL, keep boolean DEFAULT true) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT NOT EXISTS (SELECT {schema_dot}"{prefix}reject_many"(ARRAY[id], token, reason, error, keep))
$$;

CREATE FUNCTION {schema_dot}"{prefix}give_back"(id uuid, token bigint, delay double precision DEFAULT NULL)
RETURNS boolean LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
SELECT NOT EXISTS (SELECT {schema_dot}"{prefix}give_back_many"(ARRAY[id], token, delay))
$$;

-- Messages as people write them.
CREATE VIEW {message_view} AS
SELECT m.id, m.queue, m.state, m.key, m.priority, {schema_dot}"{prefix}body_text"(m.payload) AS body,
  {schema_dot}"{prefix}headers_json"(m.headers) AS headers, m.deliveries, m.attempts, m.crashes, m.last_error AS error,
  {schema_dot}"{prefix}moment"(m.created_at) AS created_at, {schema_dot}"{prefix}moment"(m.due_at) AS due_at,
  {schema_dot}"{prefix}moment"(m.expires_at) AS expires_at, {schema_dot}"{prefix}moment"(m.first_attempt_at) AS first_attempt_at,
  {schema_dot}"{prefix}moment"(m.last_attempt_at) AS last_attempt_at, {schema_dot}"{prefix}moment"(m.acquired_at) AS claimed_at,
  m.payload
FROM {message} m;

CREATE VIEW {archive_view} AS
SELECT a.id, a.queue, a.state, a.key, a.priority, {schema_dot}"{prefix}body_text"(a.payload) AS body,
  {schema_dot}"{prefix}headers_json"(a.headers) AS headers, a.deliveries, a.attempts, a.reason, a.error,
  {schema_dot}"{prefix}moment"(a.created_at) AS created_at, {schema_dot}"{prefix}moment"(a.due_at) AS due_at,
  {schema_dot}"{prefix}moment"(a.expires_at) AS expires_at, {schema_dot}"{prefix}moment"(a.first_attempt_at) AS first_attempt_at,
  {schema_dot}"{prefix}moment"(a.last_attempt_at) AS last_attempt_at, {schema_dot}"{prefix}moment"(a.acquired_at) AS claimed_at,
  {schema_dot}"{prefix}moment"(a.archived_at) AS archived_at, a.payload
FROM {archive} a;

REVOKE ALL ON FUNCTION
  {schema_dot}"{prefix}clock"(),
  {schema_dot}"{prefix}moment"(bigint),
  {schema_dot}"{prefix}channel"(),
  {schema_dot}"{prefix}body_text"(bytea),
  {schema_dot}"{prefix}headers_json"(text),
  {schema_dot}"{prefix}refuse"(text),
  {schema_dot}"{prefix}remember"(uuid),
  {schema_dot}"{prefix}publish"(text, text, uuid, text, integer, timestamptz, double precision, timestamptz, jsonb, bytea),
  {schema_dot}"{prefix}reap"(),
  {schema_dot}"{prefix}find"(text, integer, uuid[], bigint),
  {schema_dot}"{prefix}claim"(text, integer, double precision, uuid[]),
  {schema_dot}"{prefix}stale"(uuid[], bigint, text[]),
  {schema_dot}"{prefix}archive"(uuid[], bigint, text, text, text, boolean),
  {schema_dot}"{prefix}policy"(uuid[], bigint),
  {schema_dot}"{prefix}requeue"(uuid[], bigint, text, integer, integer, bigint[], text),
  {schema_dot}"{prefix}extend_many"(uuid[], bigint, double precision),
  {schema_dot}"{prefix}ack_many"(uuid[], bigint, boolean),
  {schema_dot}"{prefix}nack_many"(uuid[], bigint, double precision, text),
  {schema_dot}"{prefix}reject_many"(uuid[], bigint, text, text, boolean),
  {schema_dot}"{prefix}give_back_many"(uuid[], bigint, double precision),
  {schema_dot}"{prefix}extend"(uuid, bigint, double precision),
  {schema_dot}"{prefix}ack"(uuid, bigint, boolean),
  {schema_dot}"{prefix}nack"(uuid, bigint, double precision, text),
  {schema_dot}"{prefix}reject"(uuid, bigint, text, text, boolean),
  {schema_dot}"{prefix}give_back"(uuid, bigint, double precision)
FROM PUBLIC;
