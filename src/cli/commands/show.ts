import { decodeTokens, type Event, fold, isFinal } from '../../core/index.ts';
import { onInterrupt } from '../interrupt.ts';
import { narrate, rewardText } from '../narrate.ts';
import { duration, printable, style } from '../output.ts';
import { type Platform, resolveRunId } from '../platform.ts';
import { findJob, showJob } from './show-job.ts';

/** `longhaul show RUN|JOB`. Of a run: what it was asked, each attempt and observation, the reward, where tokens came from. */
export async function show(
  platform: Platform,
  text: string,
  options: { follow?: boolean },
): Promise<number> {
  const { output } = platform;
  const store = await platform.store();
  const job = text === 'last' ? null : await findJob(platform, text);
  if (job !== null) return showJob(platform, job);
  const runId = await resolveRunId(store, text);
  const events = await store.log.read(runId);
  const state = fold(events);
  const { spec } = state;
  const write = (line: string) => output.print(line);

  write(`${style('bold', runId)}  ${state.status}`);
  write(
    `task   ${printable(spec.task.name)}${spec.task.hash ? `  sha256 ${spec.task.hash.slice(0, 12)}` : ''}`,
  );
  write(
    `model  ${printable(spec.model.ref)}${spec.model.baseUrl ? ` at ${spec.model.baseUrl}` : ''}  agent ${spec.agent}  seed ${spec.seed}`,
  );
  if (spec.parent) write(`fork   of ${spec.parent.runId} after event ${spec.parent.seq}`);
  write('');
  for (const event of events) {
    narrate(write, event);
    if (event.type === 'model.completed') write(style('dim', `    ${await provenance(event)}`));
  }
  write('');
  if (state.reward) write(`reward ${rewardText(state.reward)}`);
  write(
    `used   ${state.used.modelCalls} model calls, ${state.used.toolCalls} tool calls, ${state.used.outputTokens} output tokens, ${duration(state.activeMs)} active`,
  );
  if (state.error) write(`why    ${printable(state.error.message)}\nnext   ${state.error.next}`);
  if (!isFinal(state.status)) write(`go on  ${platform.hint(`resume ${runId}`)}`);
  write(`fork   ${platform.hint(`fork ${runId} --at STEP`)}   (steps 0 to ${state.step})`);
  output.document({
    run: await store.log.row(runId),
    spec,
    reward: state.reward,
    used: state.used,
    events,
  });

  if (options.follow && !isFinal(state.status)) {
    const interrupt = onInterrupt(() => {});
    for await (const { event } of store.log.follow({ runId, signal: interrupt.signal })) {
      if (event.seq <= state.head) continue;
      narrate(write, event);
      output.document({ event });
      if (
        event.type === 'run.finished' ||
        event.type === 'run.cancelled' ||
        event.type === 'run.paused'
      )
        break;
    }
    interrupt.dispose();
  }
  return 0;

  async function provenance(event: Extract<Event, { type: 'model.completed' }>): Promise<string> {
    const { completion, tokens: ref } = event.data;
    if (ref === undefined) {
      const known = completion.usage.outputTokens;
      return `tokens: ${known ?? 'unknown number'} by the vendor, provenance ${completion.provenance} (not trainable by RL)`;
    }
    const tokens = decodeTokens(await store.artifacts.get(ref.sha256));
    const versions = tokens.versionSpans.map((span) => span.version).join(', ');
    const mean =
      tokens.logprobs.reduce((sum, logprob) => sum + logprob, 0) /
      Math.max(1, tokens.logprobs.length);
    return (
      `tokens: ${tokens.promptIds.length} prompt + ${tokens.ids.length} sampled, provenance ${completion.provenance}, ` +
      `weights ${versions}, mean log-prob ${mean.toFixed(3)}, temperature ${tokens.sampling.temperature}, ` +
      `renderer ${tokens.rendererHash.slice(0, 8)}, artifact ${ref.sha256.slice(0, 12)}`
    );
  }
}
