import type { RunSpec } from '../core/index.ts';
import type { Model } from '../model/contract.ts';
import { engineModel, sampleAlone } from '../model/engine-model.ts';
import { resolveModel } from '../model/index.ts';
import { tinyRenderer } from '../model/render/tiny.ts';
import type { Platform } from './platform.ts';

const EMBEDDED = 'embedded/';

/** The model a run names, closed with the platform. `embedded/FOLDER` is a checkpoint of the embedded engine. */
export async function openModel(platform: Platform, model: RunSpec['model']): Promise<Model> {
  if (model.ref.startsWith(EMBEDDED)) {
    const checkpoint = model.ref.slice(EMBEDDED.length);
    const sampler = await platform.engine().sampler({ checkpoint });
    platform.closeLater(() => sampler.close());
    return engineModel({
      ref: model.ref,
      renderer: tinyRenderer,
      maxLength: sampler.config.maxLength,
      sample: sampleAlone(sampler),
    });
  }
  const opened = await resolveModel({
    ref: model.ref,
    env: process.env,
    folders: [process.cwd()],
    ...(model.baseUrl === undefined ? {} : { baseUrl: model.baseUrl }),
  });
  platform.closeLater(async () => opened.close?.());
  return opened;
}
