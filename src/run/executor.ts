import { type Action, checkCall, cut, decide, runCall } from '../agent/index.ts';
import {
  attribute,
  type Effect,
  encodeTokens,
  idempotencyKey,
  LonghaulError,
  type Message,
  type NewEvent,
  Redactor,
  type Reward,
  type RunState,
  type Tool,
  type ToolCall,
  type ToolResult,
} from '../core/index.ts';
import type { RunContext } from './context.ts';
import { interrupted, orAbort, orOverdue } from './settle.ts';
import { Workplace } from './workplace.ts';

const MODEL_ATTEMPTS = 6;
const SANDBOX_ATTEMPTS = 3;
/** A tool ends itself at its limit; one that has not by then hangs, and so does its sandbox. */
const TOOL_GRACE_MS = 10_000;

/**
 * Drives a run to its end or to a pause, and returns its last state. Each call is logged as intended
 * before it is made; the append that logs it is fenced, so a worker that lost its lease never calls.
 *
 * Nothing but `LeaseLost` and a store that stays away is thrown: every other failure is in the log.
 * A hosted run pauses on what a person or time can mend; a rollout ends ungraded, since the
 * infrastructure's failure is never the policy's.
 */
export async function execute(context: RunContext): Promise<RunState> {
  const { journal } = context;
  const workplace = new Workplace(context);
  const inputs = new Map<string, unknown>();
  try {
    await begin(context, workplace);
    for (;;) {
      await journal.takeSignals();
      if (context.signal.aborted && context.signal.reason !== 'stop') throw interrupted();
      const { state } = journal;
      const elapsed =
        state.activeMs + Math.max(0, context.clock.now() - Date.parse(state.updatedAt));
      const action = decide(state, context.session.isOver(state), elapsed);
      if (await perform(context, workplace, inputs, action)) return journal.state;
    }
  } catch (thrown) {
    const error = attribute(thrown, 'Internal');
    if (error.code === 'LeaseLost' || error.code === 'StoreUnavailable') throw error;
    await recordFailure(context, error);
    return journal.state;
  } finally {
    await workplace.close();
  }
}

/** Starts or resumes: workspace first, so that a run that says `running` has a place to work. */
async function begin(context: RunContext, workplace: Workplace): Promise<void> {
  const { journal, session, worker, leaseToken, agent } = context;
  const fresh = journal.state.messages.length === 0;
  await journal.append([
    {
      type: journal.state.status === 'queued' ? 'run.started' : 'run.resumed',
      data: { worker, leaseToken },
    },
  ]);
  await workplace.open();
  if (fresh) {
    const system: Message[] =
      agent.system === '' ? [] : [{ role: 'system', content: agent.system }];
    await journal.append([
      ...[...system, ...session.messages].map(
        (message): NewEvent => ({ type: 'message.added', data: { message } }),
      ),
      ...(await workplace.save(null)),
    ]);
  }
}

/** Does one action. True when the run is over. */
async function perform(
  context: RunContext,
  workplace: Workplace,
  inputs: Inputs,
  action: Action,
): Promise<boolean> {
  const { journal } = context;
  switch (action.kind) {
    case 'model':
      await callModel(context, inputs, action.step, action.attempt);
      return false;
    case 'tool':
      await callTool(context, workplace, inputs, action.call, action.decision);
      return false;
    case 'cancel':
      await journal.append([
        { type: 'run.cancelled', data: { by: 'inbox', reason: action.reason } },
      ]);
      return true;
    case 'exceeded': {
      const { limit, used, allowed } = action;
      await journal.append([{ type: 'budget.exceeded', data: { limit, used, allowed } }]);
      if (journal.state.spec.kind === 'hosted') {
        throw new LonghaulError('BudgetExceeded', `the run used ${used} of ${allowed} ${limit}`);
      }
      await finish(context, workplace);
      return true;
    }
    case 'finish':
      await finish(context, workplace);
      return true;
  }
}

/** One model step: attempts with back-off until an answer, or the error that ends the patience. */
async function callModel(
  context: RunContext,
  inputs: Inputs,
  step: number,
  firstAttempt: number,
): Promise<void> {
  const { journal, model, agent, clock, session, signal } = context;
  const tools = [...session.tools, ...agent.tools];
  for (let tries = 1, attempt = firstAttempt; ; tries++, attempt++) {
    const callId = `m${step}.${attempt}`;
    await journal.append([
      { type: 'model.requested', data: { callId, model: model.ref, step, attempt } },
    ]);
    const startedAt = clock.now();
    try {
      const completion = await orAbort(
        model.complete({
          messages: journal.state.messages,
          tools,
          maxOutputTokens: agent.maxOutputTokens,
          sampling: agent.sampling,
          signal,
          ...(context.onText ? { onText: context.onText } : {}),
        }),
        signal,
      );
      const { tokens, ...rest } = completion;
      const named = withUniqueCallIds(completion.message, journal.state, step);
      // The ids of a secret are the secret: what is redacted keeps no tokens and cannot be trained on.
      const message = context.redactor.json(named);
      const clean = message === named;
      if (named.role === 'assistant') {
        for (const call of named.toolCalls ?? []) inputs.set(call.callId, call.input);
      }
      await journal.append([
        {
          type: 'model.completed',
          data: {
            callId,
            completion: { ...rest, message, provenance: clean ? rest.provenance : 'none' },
            ...(tokens && clean
              ? { tokens: await context.artifacts.put(encodeTokens(tokens)) }
              : {}),
            latencyMs: clock.now() - startedAt,
          },
        },
      ]);
      return;
    } catch (thrown) {
      if (signal.aborted && signal.reason === 'stop') return;
      const error = attribute(thrown, 'Internal', `model ${model.ref}`);
      if (
        error.code === 'LeaseLost' ||
        error.code === 'StoreUnavailable' ||
        error.code === 'Interrupted'
      )
        throw error;
      const willRetry = error.class === 'retryable' && tries < MODEL_ATTEMPTS;
      await journal.append([
        { type: 'model.failed', data: { callId, error: error.toJSON(), willRetry } },
      ]);
      if (!willRetry) throw error;
      await clock.sleep(error.retryAfterMs ?? Math.min(30_000, 500 * 2 ** (tries - 1)), signal);
      if (signal.aborted && signal.reason === 'stop') return;
      if (signal.aborted) throw interrupted();
    }
  }
}

/** Models repeat call ids ("call_1" in each turn); in a run an id names one call. */
function withUniqueCallIds(message: Message, state: RunState, step: number): Message {
  if (message.role !== 'assistant' || message.toolCalls === undefined) return message;
  const seen = new Set<string>(state.ledger.keys());
  const toolCalls = message.toolCalls.map((call) => {
    let callId = call.callId;
    for (let n = 0; seen.has(callId); n++)
      callId = `${call.callId}.s${step}${n === 0 ? '' : `.${n}`}`;
    seen.add(callId);
    return { ...call, callId };
  });
  return { ...message, toolCalls };
}

async function callTool(
  context: RunContext,
  workplace: Workplace,
  inputs: Inputs,
  call: ToolCall,
  decision: Extract<Action, { kind: 'tool' }>['decision'],
): Promise<void> {
  const { journal, clock, signal } = context;
  const tools = [...context.session.tools, ...context.agent.tools];
  const tool = tools.find((candidate) => candidate.name === call.tool);
  const key = idempotencyKey(journal.state.runId, call.callId);

  const settled = decision === 'ask' ? await askTool(context, call, tool, key) : decision;
  if (settled === 'assumeDone') {
    const output =
      'This call happened, but its result was lost when the worker stopped. Files are as they were before it.';
    const data = { callId: call.callId, tool: call.tool, output, isError: false, durationMs: 0 };
    await journal.append([{ type: 'tool.completed', data }]);
    return;
  }
  if (settled === 'rollback') {
    await workplace.reopen();
    await journal.append([
      { type: 'tool.unknown', data: { callId: call.callId, resolution: 'rolled_back' } },
    ]);
  } else if (settled === 'repeat') {
    await journal.append([
      { type: 'tool.unknown', data: { callId: call.callId, resolution: 'repeat' } },
    ]);
  }

  const valid = 'tool' in checkCall(tools, call);
  const effect = valid && tool ? tool.effect : 'none';
  for (let tries = 1; ; tries++) {
    await journal.append([
      {
        type: 'tool.requested',
        data: {
          callId: call.callId,
          tool: call.tool,
          input: call.input,
          effect,
          idempotencyKey: key,
          timeoutMs: tool?.timeoutMs ?? 0,
        },
      },
    ]);
    const startedAt = clock.now();
    try {
      const toolContext = {
        sandbox: workplace.sandbox,
        runId: journal.state.runId,
        callId: call.callId,
        idempotencyKey: key,
        signal,
      };
      const deadline = clock.now() + (tool?.timeoutMs ?? 0) + TOOL_GRACE_MS;
      const result = await orAbort(
        orOverdue(runExactly(tools, call, inputs, toolContext), call.tool, deadline, clock),
        signal,
      );
      await journal.append([
        {
          type: 'tool.completed',
          data: {
            callId: call.callId,
            tool: call.tool,
            output: result.output,
            isError: result.isError ?? false,
            durationMs: clock.now() - startedAt,
          },
        },
        ...(changesFiles(effect) ? await workplace.save(call.callId) : []),
      ]);
      return;
    } catch (thrown) {
      if (signal.aborted && signal.reason === 'stop') return;
      const error = attribute(thrown, 'Internal', `tool ${call.tool}`);
      if (
        error.code === 'LeaseLost' ||
        error.code === 'StoreUnavailable' ||
        error.code === 'Interrupted'
      )
        throw error;
      await journal.append([
        { type: 'tool.failed', data: { callId: call.callId, error: error.toJSON() } },
      ]);
      const repeatable = effect !== 'once' && (context.saveWorkspace || untouched(journal.state));
      if (error.class !== 'retryable' || !repeatable || tries >= SANDBOX_ATTEMPTS) throw error;
      await workplace.reopen();
    }
  }
}

/**
 * What the model asked for, by call id. The log holds it redacted and tools need it exact, so it lives in
 * the worker and ends with it.
 */
type Inputs = Map<string, unknown>;

function runExactly(
  tools: readonly Tool[],
  call: ToolCall,
  inputs: Inputs,
  toolContext: Parameters<typeof runCall>[2],
): Promise<ToolResult> {
  if (inputs.has(call.callId)) {
    return runCall(tools, { ...call, input: inputs.get(call.callId) }, toolContext);
  }
  if (!Redactor.marked(call.input)) return runCall(tools, call, toolContext);
  return Promise.resolve({
    output:
      'This call held a secret, which is not kept, and the worker was restarted before it ran. Send it again.',
    isError: true,
  });
}

/** A command that was allowed the network counts as `once` and changes files all the same. */
function changesFiles(effect: Effect): boolean {
  return effect === 'workspace' || effect === 'once';
}

/** Whether a fresh workspace is as good as the one that was lost: no call of the run may have changed it. */
function untouched(state: RunState): boolean {
  return [...state.ledger.values()].every((call) => !changesFiles(call.effect));
}

/**
 * A `once` call that may have happened: its tool knows, or a person must say. Not before the old call's
 * deadline, since until then it may still be going on.
 */
async function askTool(
  context: RunContext,
  call: ToolCall,
  tool: Tool | undefined,
  key: string,
): Promise<'assumeDone' | 'repeat'> {
  const { clock, signal, journal } = context;
  const entry = journal.state.ledger.get(call.callId);
  const stillRuns = entry ? Date.parse(entry.requestedAt) + entry.timeoutMs - clock.now() : 0;
  if (stillRuns > 0) await orAbort(clock.sleep(stillRuns, signal), signal);
  const status = (await tool?.status?.(key)) ?? 'unknown';
  if (status === 'done') return 'assumeDone';
  if (status === 'absent') return 'repeat';
  await context.journal.append([
    { type: 'tool.unknown', data: { callId: call.callId, resolution: 'ask' } },
  ]);
  throw new LonghaulError(
    'EffectUnknown',
    `nobody knows whether the call ${call.callId} of ${call.tool} happened before the worker stopped`,
  );
}

async function finish(context: RunContext, workplace: Workplace): Promise<void> {
  const { journal, session } = context;
  const { reward, output } = await session.grade(journal.state, workplace.sandbox);
  const graded: NewEvent = {
    type: 'grade.recorded',
    data: {
      reward,
      grader: session.ref.environment,
      ...(output === undefined ? {} : { output: cut(output) }),
    },
  };
  if (reward.value === null && journal.state.spec.kind === 'hosted') {
    await journal.append([graded]);
    throw new LonghaulError('GraderFailed', `ungraded (${reward.status}): ${reward.reason}`);
  }
  await journal.append([graded, { type: 'run.finished', data: ending(journal.state, reward) }]);
}

function ending(
  state: RunState,
  reward: Reward,
): Extract<NewEvent, { type: 'run.finished' }>['data'] {
  const last = state.messages.findLast((message) => message.role === 'assistant');
  const summary = cut(last?.content ?? '', 2000);
  if (reward.value === null) {
    const error = new LonghaulError(
      'GraderFailed',
      `ungraded (${reward.status}): ${reward.reason}`,
    );
    return { status: 'failed', summary, error: error.toJSON() };
  }
  return { status: reward.value > 0 ? 'succeeded' : 'failed', summary };
}

async function recordFailure(context: RunContext, error: LonghaulError): Promise<void> {
  const { journal, session } = context;
  const { kind } = journal.state.spec;
  if (kind === 'hosted' && error.class !== 'terminal') {
    await journal.append([{ type: 'run.paused', data: { error: error.toJSON() } }]);
    return;
  }
  const ungraded: NewEvent = {
    type: 'grade.recorded',
    data: {
      reward: {
        status: 'env_error',
        value: null,
        components: {},
        reason: `${error.code}: ${error.message}`,
      },
      grader: session.ref.environment,
    },
  };
  await journal.append([
    ...(kind === 'hosted' ? [] : [ungraded]),
    {
      type: 'run.finished',
      data: { status: 'failed', summary: error.message, error: error.toJSON() },
    },
  ]);
}
